"""Errors in the format of the OpenAI API: a status and one object, never a traceback.

{"error": {"message": "...", "type": "invalid_request_error", "param": "n", "code": null}}
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penstock.core.errors import PenstockError, UsageError, near_match, nearest
from penstock.core.log import EventLog
from penstock.serve.schema.base import Reply

log = EventLog(__name__)

_MAX_REPORTED = 5
_SHOWN_CHARACTERS = 80
_LONGEST_KEY = 40
"""Maximum length of an unknown key for which a similar known one is suggested."""


class ErrorObject(Reply):
    """Error: what is wrong, the value, and what to do."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply):
    """Body of every response that is not 2xx."""

    error: ErrorObject


class ApiError(Exception):
    """Error response to a client.

    Args:
        status: of HTTP; by default the request is wrong.
        param: key of the request that caused the error.
        code: machine-readable code, such as `model_not_found`.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
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
        """Return the JSON body."""
        return ErrorReply(
            error=ErrorObject(message=str(self), type=_type_of(self.status), param=self.param, code=self.code)
        )

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(self.retry_after_s)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(self.body().model_dump(), status_code=self.status, headers=headers)


def ending() -> ApiError:
    """Return the error for requests while the server shuts down."""
    return ApiError(
        "The server is shutting down. Use another.", status=503, code="server_draining", retry_after_s=1
    )


def too_long(context: int, why: str, *, param: str, answer: bool = False) -> ApiError:
    """Return the error for a prompt that is too long, alone or (`answer`) for the answer requested.

    Clients look for these words: litellm for the first clause, langchain for "prompt is too long".
    """
    long = "too long for that answer" if answer else "too long"
    said = f"This model's maximum context length is {context} tokens, and the prompt is {long}: {why}"
    return ApiError(said, param=param, code="context_length_exceeded")


def api_error_of(error: PenstockError, *, param: str | None = None) -> ApiError:
    """Convert an error of ours: the client's mistakes (UsageError) are 400, all others 500."""
    return ApiError(str(error), status=400 if isinstance(error, UsageError) else 500, param=param)


_NAMED_ELSE = {"bad_words_ids": "bad_words", "num_answers": "n", "num_logprobs": "top_logprobs"}
"""Key of a request -> by the engine's name."""


def named_key(error: PenstockError, keys: Collection[str]) -> str | None:
    """Return the key of a request that an error's message begins with; None: no key.

    >>> named_key(UsageError("top_p must be in (0, 1]"), ["top_p"]), named_key(UsageError("No."), ["top_p"])
    ('top_p', None)
    """
    first, *_ = str(error).split(maxsplit=1)
    name = _NAMED_ELSE.get(first, first)
    return name if name in keys else None


def add_handlers(app: FastAPI) -> None:
    """Respond to every failure with an error object; `app.state.addresses` are suggested for unknown
    paths."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(PenstockError, _on_penstock_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


def unexpected(error: BaseException) -> ApiError:
    """Log an internal error; return the response without its details."""
    log.error(
        "request_failed",
        "A request failed by a defect: {error}",
        error=type(error).__name__,
        exc_info=error,
    )
    return ApiError("Internal error. The server's log has the details.", status=500)


def _type_of(status: int) -> str:
    named: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "invalid_request_error" if status < 500 else "server_error")


async def _on_api_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError), error
    return error.response()


async def _on_penstock_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, PenstockError), error
    return api_error_of(error, param=named_key(error, _keys_of(request))).response()


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), error
    if isinstance(error.body, bytes):  # not parsed, because it is declared to be another type
        declared = (request.headers.get("content-type") or "none")[:_SHOWN_CHARACTERS]
        fix = "Send `Content-Type: application/json`."
        return ApiError(
            f"The body's Content-Type must be JSON (got Content-Type: {declared}). {fix}", status=415
        ).response()
    found = error.errors()
    known = _keys_of(request)
    said = "; ".join(_sentence(one, error.body, known) for one in found[:_MAX_REPORTED])
    more = f"; and {len(found) - _MAX_REPORTED} more" if len(found) > _MAX_REPORTED else ""
    param = None if found[0].get("type") == "json_invalid" else _where(found[0], error.body) or None
    return ApiError(f"{said}{more}.", param=param).response()


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException), error
    response = ApiError(_told(request, error), status=error.status_code).response()
    response.headers.update(error.headers or {})
    return response


def _told(request: Request, error: HTTPException) -> str:
    """Return the message for an error of the web frameworks."""
    method, path = request.method, request.url.path[:_SHOWN_CHARACTERS]
    match error.status_code:
        case 404:
            return f"There is no route {path}. {nearest(path, request.app.state.addresses)}"
        case 405:
            return f"{method} is not supported by {path}. Use {(error.headers or {}).get('Allow', 'GET')}."
        case 400:
            return f"The body is not JSON{_unread(error.__cause__)}."
    return f"{error.detail}."


def _unread(cause: BaseException | None) -> str:
    match cause:
        case UnicodeDecodeError():
            return f": byte {cause.start:,} is not {cause.encoding.upper()}"
        case RecursionError():
            return " that can be read: it is nested too deeply"
        case ValueError():
            return ": a number has too many digits"
    return ""


async def _on_unexpected(_request: Request, error: Exception) -> JSONResponse:
    return unexpected(error).response()


def _where(one: Mapping[str, object], body: object) -> str:
    """Return the path of the key, without the names of union members that pydantic adds."""
    location, context = one.get("loc"), one.get("ctx")
    assert isinstance(location, tuple), location
    if one.get("type") == "refused" and isinstance(context, dict):
        location = (*location, context["key"])
    return key_of(location[1:], body)


def key_of(location: Sequence[str | int], body: object) -> str:
    """Return the path of an error in a body: existing keys, then a missing key.

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
            continue  # the name of a union member, not a key
        found.append(str(part))
    return ".".join(found)


def _keys_of(request: Request) -> list[str]:
    """Return the keys that the body of this route may have."""
    field = getattr(request.scope.get("route"), "body_field", None)
    model = None if field is None else field.field_info.annotation
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        return []
    return [one.alias or name for name, one in model.model_fields.items()]


def _sentence(one: Mapping[str, Any], body: object, known: Sequence[str]) -> str:  # Any: as pydantic has it
    """Return an error of pydantic as one clause: the key, what is wrong, the value."""
    where, what, kind = _where(one, body), str(one.get("msg")).removesuffix("."), one.get("type")
    if kind == "extra_forbidden":
        meant = near_match(where, list(known)) if len(where) <= _LONGEST_KEY and "." not in where else None
        return f"{where}: unknown key" + (f" (did you mean {meant!r}?)" if meant else "")
    if kind == "json_invalid":
        return f"The body is not JSON: {one['ctx']['error']} (character {one['loc'][-1]:,})"
    if kind == "missing":
        return f"{where}: this key is missing" if where else "The body is missing"
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        what = "Must be an object"
    if kind == "none_required":
        what = "Must be null, or left out"
    context = one.get("ctx")
    if kind in ("union_tag_invalid", "union_tag_not_found") and isinstance(context, dict):
        forms = f", one of {context['expected_tags']}" if "expected_tags" in context else ""
        what = f"Must have a known {context['discriminator']}{forms}"
    given = context["given"] if kind == "refused" and isinstance(context, dict) else one.get("input")
    shown = repr(given)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "..."
    return f"{where}: {what} (got {shown})" if where else f"The body: {what}"
