"""Server-sent events: one `data:` line per chunk, then `[DONE]`; errors are a chunk of their own.

While nothing is sent, because an answer is waiting, a comment is sent now and then: proxies close idle
streams, and clients ignore comments.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from penstock.core.errors import PenstockError
from penstock.serve.errors import ApiError, api_error_of, unexpected

QUIET_S = 10.0
"""Seconds without an event after which a comment is sent; proxies wait for 30 to 60."""
_COMMENT = b": still here\n\n"


class EventStream(StreamingResponse):
    """Streams chunks as server-sent events.

    Args:
        chunks: may raise ApiError; the status is already sent, so the error becomes the last event.
        failed: converts the error to that event.
        last: text sent at the end.
    """

    def __init__(
        self,
        chunks: AsyncIterator[BaseModel],
        *,
        failed: Callable[[ApiError], BaseModel] = ApiError.body,
        last: str = "data: [DONE]\n\n",
        quiet_s: float = QUIET_S,
    ) -> None:
        self._quiet_s = quiet_s
        self._cut_by: int | None = None
        super().__init__(
            self._events(chunks, failed, last),
            media_type="text/event-stream",
            # X-Accel-Buffering is nginx's: do not buffer the stream
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; an error that cuts it is known to the request's context."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            if visit := scope.get("state", {}).get("visit"):
                visit.cut_by = self._cut_by

    async def stream_response(self, send: Send) -> None:
        """Send all chunks, with comments in between."""
        line = _Line(send)
        keeper = asyncio.create_task(line.keep_open(self._quiet_s))
        try:
            await super().stream_response(line.send)
        finally:
            keeper.cancel()

    async def _events(
        self, chunks: AsyncIterator[BaseModel], failed: Callable[[ApiError], BaseModel], last: str
    ) -> AsyncIterator[str]:
        fault: ApiError | None = None
        try:
            async for chunk in chunks:
                yield event(chunk)
        except ApiError as error:
            fault = error
        except PenstockError as error:
            fault = api_error_of(error)
        except Exception as error:  # a defect: the stream has begun, so its last event must tell of it
            fault = unexpected(error)
        if fault is not None:
            self._cut_by = fault.status
            yield event(failed(fault))
        if last:
            yield last


class _Line:
    """One connection with two writers, which never write at the same time."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._num_begun = self._num_sent = 0

    async def send(self, message: Message) -> None:
        """Send an ASGI message."""
        self._num_begun += 1
        await self._send(message)
        self._num_sent += 1

    async def keep_open(self, quiet_s: float) -> None:
        """Send a comment when nothing was sent for `quiet_s` and no write is pending."""
        while True:
            before = self._num_begun
            await asyncio.sleep(quiet_s)
            if before == self._num_begun == self._num_sent:
                await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


def event(chunk: BaseModel) -> str:
    """Format one event, named by its type if it has one; JSON contains no newline."""
    name = f"event: {kind}\n" if (kind := getattr(chunk, "type", None)) else ""
    return f"{name}data: {chunk.model_dump_json()}\n\n"
