"""Turns the pieces of one answer into the events of `/v1/responses`, and into the whole; pure."""

from collections.abc import Iterator
from typing import Any

from penstock.engine.request import Piece
from penstock.serve.errors import ApiError
from penstock.serve.schema.generation import Usage
from penstock.serve.schema.responses import (
    IncompleteDetails,
    InputTokensDetails,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseFault,
    ResponseReply,
    ResponseUsage,
    Status,
)


class ResponseWriter:
    """One answer, which is one message of one text.

    Args:
        frame: the reply before there is an answer.
        message_id: of the message.
    """

    def __init__(self, frame: ResponseReply, *, message_id: str) -> None:
        self._frame = frame
        self._message_id = message_id
        self._texts: list[str] = []
        self._is_cut = False
        self._num_events = 0

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield what comes before any text."""
        yield self._event("created", response=self._frame)
        yield self._event("in_progress", response=self._frame)
        item = OutputMessage(id=self._message_id, status="in_progress", content=[])
        yield self._event("output_item.added", output_index=0, item=item)
        yield self._part_event("content_part.added", part=OutputText(text=""))

    def take(self, piece: Piece) -> Iterator[ResponseEvent]:
        """Yield what a piece adds, which may be nothing."""
        self._is_cut |= piece.finish == "length"
        if piece.text:
            self._texts.append(piece.text)
            yield self._part_event("output_text.delta", delta=piece.text, logprobs=[])

    def end(self, usage: Usage) -> Iterator[ResponseEvent]:
        """Yield what comes after the last piece."""
        reply = self.reply(usage)
        [item] = reply.output
        [part] = item.content
        yield self._part_event("output_text.done", text=part.text, logprobs=[])
        yield self._part_event("content_part.done", part=part)
        yield self._event("output_item.done", output_index=0, item=item)
        yield self._event(reply.status, response=reply)

    def failed(self, error: ApiError) -> ResponseEvent:
        """Return the last event of a stream that fails."""
        fault = ResponseFault(message=str(error))
        reply = self._frame.model_copy(update={"status": "failed", "error": fault})
        return self._event("failed", response=reply)

    def reply(self, usage: Usage) -> ResponseReply:
        """Return the whole, once the last piece was taken."""
        status: Status = "incomplete" if self._is_cut else "completed"
        part = OutputText(text="".join(self._texts))
        return self._frame.model_copy(
            update={
                "status": status,
                "incomplete_details": IncompleteDetails() if self._is_cut else None,
                "output": [OutputMessage(id=self._message_id, status=status, content=[part])],
                "usage": ResponseUsage(
                    input_tokens=usage.prompt_tokens,
                    input_tokens_details=InputTokensDetails(
                        cached_tokens=usage.prompt_tokens_details.cached_tokens
                    ),
                    output_tokens=usage.completion_tokens,
                    total_tokens=usage.total_tokens,
                ),
            }
        )

    def _part_event(self, kind: str, **fields: Any) -> ResponseEvent:  # Any: fields of ResponseEvent
        return self._event(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:  # as above
        event = ResponseEvent(type=f"response.{kind}", sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event
