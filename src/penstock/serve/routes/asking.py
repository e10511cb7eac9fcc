"""What routes have in common: who asks, which service, and how failures are documented."""

import secrets
from typing import Any

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from penstock.serve.gate import Visit
from penstock.serve.schema.others import ErrorReply
from penstock.serve.served import Service

FAILURES: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
"""For the OpenAPI document; Any as FastAPI has it."""

_EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"itemSchema": _EVENT}}},  # the word of OpenAPI 3.2
    **FAILURES,
}
"""Also of routes that can stream."""


def service_of(request: Request) -> Service:
    """Return the service behind an application."""
    service: Service = request.app.state.service
    return service


def visit_of(request: Request) -> Visit:
    """Return who asks."""
    visit: Visit = request.state.visit
    return visit


def new_id(kind: str) -> str:
    """Return an id that nobody can guess."""
    return f"{kind}-{secrets.token_hex(12)}"


def reply(body: BaseModel) -> Response:
    """Return an answer that is known to be of its type: it is written once and not checked again."""
    return Response(body.model_dump_json(), media_type="application/json")
