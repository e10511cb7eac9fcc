"""Errors as the OpenAI API writes them: a status, one object, never a traceback.

{"error": {"message": "...", "type": "invalid_request_error", "param": "n", "code": null}}
"""

import logging
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penstock.core.errors import PenstockError, UsageError, nearest
from penstock.serve.schema.others import ErrorObject, ErrorReply

log = logging.getLogger(__name__)

_MAX_REPORTED = 5
_SHOWN_CHARACTERS = 80
_LONGEST_KEY = 40
"""That may be a known one misspelled."""


class ApiError(Exception):
    """What a client is told instead of an answer.

    Args:
        param: the key of the request that is wrong.
        code: for programs, such as `model_not_found`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> ErrorReply:
        """Return the object of the answer."""
        return ErrorReply(
            error=ErrorObject(message=str(self), type=_type_of(self.status), param=self.param, code=self.code)
        )

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body().model_dump(), status_code=self.status, headers=headers)


def ending() -> ApiError:
    """Return what is told to whoever asks a server that is about to end."""
    return ApiError(503, "The server is ending. Ask another.", code="server_draining", retry_after_s=1)


def api_error_of(error: PenstockError, *, param: str | None = None) -> ApiError:
    """Return what a client is told of an error of ours: its own mistakes are 400, all else 500."""
    return ApiError(400 if isinstance(error, UsageError) else 500, str(error), param=param)


def add_handlers(app: FastAPI) -> None:
    """Answer every kind of failure with an error object; `app.state.addresses` names what could be meant."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


def unexpected(error: Exception) -> ApiError:
    """Log a fault of ours and return what a client may know of it."""
    log.error("request_failed error=%s", type(error).__name__, exc_info=error)
    return ApiError(500, "The server failed on this request. Its log says why.")


def _type_of(status: int) -> str:
    named: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


async def _on_api_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError), error
    return error.response()


async def _on_penstock_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PenstockError), error
    return api_error_of(error).response()


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), error
    if isinstance(error.body, bytes):  # read as it was, because it is declared to be something else
        declared = (request.headers.get("content-type") or "none")[:_SHOWN_CHARACTERS]
        fix = "Send `Content-Type: application/json`."
        return ApiError(
            415, f"The body is not declared to be JSON (got Content-Type: {declared}). {fix}"
        ).response()
    found = error.errors()
    known = _keys_of(request)
    said = "; ".join(_sentence(one, error.body, known) for one in found[:_MAX_REPORTED])
    more = f"; and {len(found) - _MAX_REPORTED} more" if len(found) > _MAX_REPORTED else ""
    param = None if found[0].get("type") == "json_invalid" else _where(found[0], error.body) or None
    return ApiError(400, f"{said}{more}.", param=param).response()


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), error
    response = ApiError(error.status_code, _told(request, error)).response()
    response.headers.update(error.headers or {})
    return response


def _told(request: Request, error: HTTPException) -> str:
    """Return in our words what the frameworks below found."""
    method, path = request.method, request.url.path[:_SHOWN_CHARACTERS]
    match error.status_code:
        case 404:
            return f"There is nothing at {path}. {nearest(path, request.app.state.addresses)}"
        case 405:
            return f"{method} does not go with {path}. Use {(error.headers or {}).get('Allow', 'GET')}."
        case 400:
            return f"The body is not JSON{_unread(error.__cause__)}."
    return f"{error.detail}."


def _unread(cause: BaseException | None) -> str:
    match cause:
        case UnicodeDecodeError():
            return f": byte {cause.start:,} is not {cause.encoding.upper()}"
        case RecursionError():
            return " that is read: it is nested too deeply"
        case ValueError():
            return ": a number has too many digits"
    return ""


async def _on_unexpected(_request: Request, error: Exception) -> JSONResponse:
    return unexpected(error).response()


def _where(one: Mapping[str, object], body: object) -> str:
    """Return the key that is meant, without the names of forms that pydantic has in between."""
    location = one.get("loc")
    assert isinstance(location, tuple), location
    return key_of(location[1:], body)


def key_of(location: Sequence[str | int], body: object) -> str:
    """Return where in a body something is wrong: the parts of its path that are there, and a key that is not.

    >>> key_of(("messages", 0, "user", "content"), {"messages": [{"role": "user", "content": 5}]})
    'messages.0.content'
    >>> key_of(("input", "items", 0, "message", "role"), {"input": [{"content": "a"}]})
    'input.0.role'
    >>> key_of(("input", "items"), {"input": []})
    'input'
    """
    found = []
    for at, part in enumerate(location):
        held: dict[str | int, object] = body if isinstance(body, dict) else {}
        if isinstance(body, list):
            held = dict(enumerate(body))
        if part in held:
            body = held[part]
        elif at < len(location) - 1 or not isinstance(body, dict):
            continue  # the name of a form, not a key
        found.append(str(part))
    return ".".join(found)


def _keys_of(request: Request) -> list[str]:
    """Return the keys that the body of a request to this route may have."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = None if field is None else field.field_info.annotation
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [one.alias or name for name, one in model.model_fields.items()]


def _sentence(one: Mapping[str, Any], body: object, known: Sequence[str]) -> str:  # Any: as pydantic has it
    """Return what pydantic found as one clause: the key, what is wrong, the value."""
    where, what, kind = _where(one, body), str(one.get("msg")), one.get("type")
    if kind == "extra_forbidden":
        meant = (
            get_close_matches(where, known, n=1) if len(where) <= _LONGEST_KEY and "." not in where else []
        )
        return f"{where}: this key is not known" + (f" (is {meant[0]!r} meant?)" if meant else "")
    if kind == "json_invalid":
        return f"The body is not JSON: {one['ctx']['error']} (character {one['loc'][-1]:,})"
    if kind == "missing":
        return f"{where}: this key is missing" if where else "There is no body"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        what = "Must be an object"
    if kind == "none_required":
        what = "Must be null, or left out"
    context = one.get("ctx")
    if kind in ("union_tag_invalid", "union_tag_not_found") and isinstance(context, dict):
        forms = f", one of {context['expected_tags']}" if "expected_tags" in context else ""
        what = f"Must have a known {context['discriminator']}{forms}"
    shown = repr(one.get("input"))
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "..."
    return f"{where}: {what} (got {shown})" if where else f"The body: {what}"
