"""Shared parts of routes: request context, application state, documented errors."""

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.serve.errors import ErrorReply
from penstock.serve.middleware import RequestContext
from penstock.serve.state import AppState

FAILURES: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
"""Error responses for the OpenAPI document; Any as in FastAPI."""

_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}},  # itemSchema is OpenAPI 3.2
    **FAILURES,
}
"""Responses of routes that can stream."""


def service_of(request: Request) -> AppState:
    """Return the application's state."""
    service: AppState = request.app.state.service
    return service


def visit_of(request: Request) -> RequestContext:
    """Return the context of a request."""
    visit: RequestContext = request.state.visit
    return visit


def new_id(kind: str) -> str:
    """Return a random, unguessable id."""
    return f"{kind}-{secrets.token_hex(12)}"


def reply(body: BaseModel) -> Response:
    """Return a JSON response of a validated model, without validating it again."""
    return Response(body.model_dump_json(), media_type="application/json")


def telling(not_enforced: Sequence[str], response: Response) -> Response:
    """Return a response whose header names the schemas' keywords that its answer need not follow."""
    if not_enforced:
        names = quote(", ".join(not_enforced), safe=" ,/#$'~[]():")
        response.headers["X-Penstock-Not-Enforced"] = names[:_MAX_HEADER]
    return response


_MAX_HEADER = 2000
"""Characters of a header; proxies refuse responses with headers of some KiB."""
