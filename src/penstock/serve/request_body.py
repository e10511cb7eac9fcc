"""Request bodies: reading within limits of size and time."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Message, Receive

from penstock.serve.errors import ApiError, ending
from penstock.serve.limits import ServerLimits

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Bodies:
    """Reads bodies until shutdown; for one event loop."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._timeouts: set[asyncio.Timeout] = set()
        self._ended = False

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes | None:
        """Return the whole body; None if the client disconnected.

        Raises:
            ApiError: 413 too large, 408 too slow, 415 compressed, 503 shutdown before it arrived.
        """
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(
                f"Compressed bodies are refused (got {encoding[:40]!r}). Send plain JSON.", status=415
            )
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > self._limits.max_body_bytes:
            raise self._too_large()
        seconds = self._limits.body_timeout_s
        try:
            async with asyncio.timeout(0 if self._ended else seconds) as timeout:
                self._timeouts.add(timeout)
                try:
                    return await self._whole(receive)
                finally:
                    self._timeouts.remove(timeout)
        except TimeoutError:
            if self._ended:
                raise ending() from None
            raise ApiError(f"The body did not arrive within {seconds:g} seconds.", status=408) from None

    def end(self) -> None:
        """Stop waiting for bodies; those already received can still be read."""
        self._ended = True
        for timeout in self._timeouts:
            if not timeout.expired():
                timeout.reschedule(0)

    async def _whole(self, receive: Receive) -> bytes | None:
        chunks, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limits.max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self) -> ApiError:
        most = self._limits.max_body_bytes
        return ApiError(f"The body is larger than the limit of {most:,} bytes.", status=413)


def check_unicode(body: bytes) -> None:
    """Refuse lone surrogates, which JSON can express and text cannot.

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
            f"The body is not Unicode text: {half!r} is half of a pair. Send the whole character."
        ) from None
    except (ValueError, RecursionError):
        return  # not JSON: the parser will report that


def _may_hold_half(body: bytes) -> bool:
    """True if the body may contain one: UTF-8 without escapes has whole characters only."""
    if b"\0" in body or _SURROGATE.search(body):  # zeros occur in UTF-16
        return True
    try:
        body.decode()
    except UnicodeDecodeError:
        return True
    return False


def replay(body: bytes, left: asyncio.Event) -> Callable[[], Awaitable[Message]]:
    """Return an ASGI `receive` that returns the body once, then waits for the client to disconnect."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    return receive
