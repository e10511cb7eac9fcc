"""Server-sent events: one `data:` line per chunk, `[DONE]` at the end, an error as a chunk of its own."""

from collections.abc import AsyncIterator

from pydantic import BaseModel
from starlette.responses import StreamingResponse

from penstock.core.errors import PenstockError
from penstock.serve.errors import ApiError, api_error_of, unexpected


class EventStream(StreamingResponse):
    """Sends chunks as they come.

    Args:
        chunks: may raise ApiError: the status is sent by then, so it becomes the last event.
    """

    def __init__(self, chunks: AsyncIterator[BaseModel]) -> None:
        super().__init__(
            _events(chunks),
            media_type="text/event-stream",
            # the second is nginx's: do not gather a stream into blocks
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )


async def _events(chunks: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
    failed: ApiError | None = None
    try:
        async for chunk in chunks:
            yield event(chunk)
    except ApiError as error:
        failed = error
    except PenstockError as error:
        failed = api_error_of(error)
    except Exception as error:
        failed = unexpected(error)
    if failed is not None:
        yield event(failed.body())
    yield "data: [DONE]\n\n"


def event(chunk: BaseModel) -> str:
    """Return one event; JSON has no newline in it."""
    return f"data: {chunk.model_dump_json()}\n\n"
