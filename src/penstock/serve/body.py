"""Reads the body of a request, within limits of size and time."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Message, Receive

from penstock.serve.errors import ApiError
from penstock.serve.limits import Limits

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(receive: Receive, headers: Mapping[str, str], limits: Limits) -> bytes | None:
    """Return the whole body; None if the client left before its end.

    Raises:
        ApiError: it is too large (413) or too slow (408).
    """
    declared = headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > limits.max_body_bytes:
        raise _too_large(limits)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > limits.max_body_bytes:
                    raise _too_large(limits)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {limits.body_timeout_s:g} seconds.") from None


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"The body is larger than the {limits.max_body_bytes:,} bytes the server reads.")


def check_unicode(body: bytes) -> None:
    """Refuse halves of surrogate pairs, which JSON can spell and no text can hold.

    Raises:
        ApiError: there is one.
    """
    if not _may_hold_half(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ApiError(
            400, f"The body is not Unicode text: {half!r} is half of a pair. Send the whole character."
        ) from None
    except (ValueError, RecursionError):
        return  # it is no JSON, as whoever reads it will say


def _may_hold_half(body: bytes) -> bool:
    """Whether it is worth a closer look: in UTF-8 without escapes there are whole characters only."""
    if b"\0" in body or _SURROGATE.search(body):  # zeros are those of UTF-16
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return True
    return False


def replay(body: bytes, left: asyncio.Event) -> Callable[[], Awaitable[Message]]:
    """Return a `receive` that has the body once, then waits for the client to leave."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    return receive
