"""Reads the bodies of requests, within limits of size and time."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import Message, Receive

from penstock.serve.errors import ApiError, ending
from penstock.serve.limits import Limits

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Bodies:
    """Reads bodies until the server ends; for one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._timeouts: set[asyncio.Timeout] = set()
        self._ended = False

    async def read(self, receive: Receive, headers: Mapping[str, str]) -> bytes | None:
        """Return the whole body; None if the client left before its end.

        Raises:
            ApiError: it is too large (413), too slow (408) or compressed (415), or the server ends before it
                has come (503).
        """
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise ApiError(415, f"Compressed bodies are not read (got {encoding[:40]!r}). Send it as it is.")
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
            raise ApiError(408, f"The body did not arrive within {seconds:g} seconds.") from None

    def end(self) -> None:
        """Wait for no body any more; those that are there can be read."""
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
        return ApiError(413, f"The body is larger than the {most:,} bytes the server reads.")


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
