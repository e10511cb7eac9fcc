"""Server-sent events: one `data:` line per chunk, `[DONE]` at the end, an error as a chunk of its own.

Where nothing is sent for a while, because an answer waits its turn, a comment is: proxies close streams that
are silent, and clients pass comments over.
"""

import asyncio
from collections.abc import AsyncIterator, Callable

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from penstock.core.errors import PenstockError
from penstock.serve.errors import ApiError, api_error_of, unexpected

QUIET_S = 10.0
"""Without an event, after which a comment is sent; proxies wait for 30 to 60."""
_COMMENT = b": still here\n\n"


class EventStream(StreamingResponse):
    """Sends chunks as they come.

    Args:
        chunks: may raise ApiError: the status is sent by then, so it becomes the last event.
        failed: makes that event.
        last: is sent after everything.
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
        super().__init__(
            _events(chunks, failed, last),
            media_type="text/event-stream",
            # the second is nginx's: do not gather a stream into blocks
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def stream_response(self, send: Send) -> None:
        """Send everything, and comments while there is nothing."""
        line = _Line(send)
        keeper = asyncio.create_task(line.keep_open(self._quiet_s))
        try:
            await super().stream_response(line.send)
        finally:
            keeper.cancel()


class _Line:
    """One connection, which two write to; never both at once."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._num_begun = self._num_sent = 0

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        self._num_begun += 1
        await self._send(message)
        self._num_sent += 1

    async def keep_open(self, quiet_s: float) -> None:
        """Send a comment whenever nothing has been sent for a while, and nothing waits for a slow reader."""
        while True:
            before = self._num_begun
            await asyncio.sleep(quiet_s)
            if before == self._num_begun == self._num_sent:
                await self._send({"type": "http.response.body", "body": _COMMENT, "more_body": True})


async def _events(
    chunks: AsyncIterator[BaseModel], failed: Callable[[ApiError], BaseModel], last: str
) -> AsyncIterator[str]:
    fault: ApiError | None = None
    try:
        async for chunk in chunks:
            yield event(chunk)
    except ApiError as error:
        fault = error
    except PenstockError as error:
        fault = api_error_of(error)
    except Exception as error:
        fault = unexpected(error)
    if fault is not None:
        yield event(failed(fault))
    if last:
        yield last


def event(chunk: BaseModel) -> str:
    """Return one event, named by its type if it has one; JSON has no newline in it."""
    name = f"event: {kind}\n" if (kind := getattr(chunk, "type", None)) else ""
    return f"{name}data: {chunk.model_dump_json()}\n\n"
