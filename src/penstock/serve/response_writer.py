"""Turns the pieces of one answer into the events of `/v1/responses`, and into the whole; pure.

An answer is a list of items, messages and calls, of which one is open at a time:

    created, in_progress
    output_item.added, content_part.added, output_text.delta...             a message
        output_text.done, content_part.done, output_item.done
    output_item.added, function_call_arguments.delta...                     a call
        function_call_arguments.done, output_item.done
    completed or incomplete, with the whole
"""

import secrets
from collections.abc import Iterator
from typing import Any

from penstock.engine.request import Piece
from penstock.serve.chat_writer import ChatWriter
from penstock.serve.errors import ApiError
from penstock.serve.schema.chat_reply import DeltaToolCall
from penstock.serve.schema.generation import Usage
from penstock.serve.schema.response_reply import (
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputMessage,
    OutputText,
    ResponseEvent,
    ResponseFault,
    ResponseReply,
    ResponseUsage,
    Status,
)
from penstock.serve.tool_choice import ToolUse


class ResponseWriter:
    """One answer.

    Args:
        frame: the reply before there is an answer.
        use: of tools.
    """

    def __init__(self, frame: ResponseReply, *, use: ToolUse) -> None:
        self._frame = frame
        self._answer = ChatWriter(0, names=None, use=use)
        self._calls_are_whole = use.forced is None
        self._done: list[OutputMessage | OutputCall] = []
        self._open: OutputMessage | OutputCall | None = None
        self._said: list[str] = []
        """Of the open item."""
        self._is_cut = False
        self._num_events = 0

    def begin(self) -> Iterator[ResponseEvent]:
        """Yield what comes before any piece."""
        yield self._event("created", response=self._frame)
        yield self._event("in_progress", response=self._frame)

    def take(self, piece: Piece) -> Iterator[ResponseEvent]:
        """Yield what a piece adds, which may be nothing."""
        self._is_cut |= piece.finish == "length"
        delta = self._answer.take(piece).delta
        if delta.content:
            yield from self._write(delta.content)
        for call in delta.tool_calls or ():
            yield from self._call(call)

    def end(self, usage: Usage) -> Iterator[ResponseEvent]:
        """Yield what comes after the last piece; the last has the whole."""
        status: Status = "incomplete" if self._is_cut else "completed"
        if self._open is None and not self._done:
            yield from self._open_message()
        yield from self._close(status)
        reply = self._frame.model_copy(
            update={
                "status": status,
                "incomplete_details": IncompleteDetails() if self._is_cut else None,
                "output": self._done,
                "usage": _usage(usage),
            }
        )
        yield self._event(status, response=reply)

    def failed(self, error: ApiError) -> ResponseEvent:
        """Return the last event of a stream that fails."""
        fault = ResponseFault(message=str(error))
        reply = self._frame.model_copy(update={"status": "failed", "error": fault})
        return self._event("failed", response=reply)

    def _write(self, text: str) -> Iterator[ResponseEvent]:
        if not isinstance(self._open, OutputMessage):
            yield from self._open_message()
        self._said.append(text)
        yield self._item_event("output_text.delta", content_index=0, delta=text, logprobs=[])

    def _call(self, call: DeltaToolCall) -> Iterator[ResponseEvent]:
        if call.id is not None:
            yield from self._close("completed")
            item_id, name = f"fc-{secrets.token_hex(12)}", call.function.name or ""
            yield self._opened(
                OutputCall(id=item_id, call_id=call.id, name=name, arguments="", status="in_progress")
            )
        if call.function.arguments:
            self._said.append(call.function.arguments)
            yield self._item_event("function_call_arguments.delta", delta=call.function.arguments)
        if self._calls_are_whole:
            yield from self._close("completed")

    def _open_message(self) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        item_id = f"msg-{secrets.token_hex(12)}"
        yield self._opened(OutputMessage(id=item_id, status="in_progress", content=[]))
        yield self._item_event("content_part.added", content_index=0, part=OutputText(text=""))

    def _opened(self, item: OutputMessage | OutputCall) -> ResponseEvent:
        self._open, self._said = item, []
        return self._event("output_item.added", output_index=len(self._done), item=item)

    def _close(self, status: Status) -> Iterator[ResponseEvent]:
        """Yield the end of the open item, if there is one."""
        item, text = self._open, "".join(self._said)
        if item is None:
            return
        if isinstance(item, OutputMessage):
            part = OutputText(text=text)
            yield self._item_event("output_text.done", content_index=0, text=text, logprobs=[])
            yield self._item_event("content_part.done", content_index=0, part=part)
            item = item.model_copy(update={"status": status, "content": [part]})
        else:
            yield self._item_event("function_call_arguments.done", arguments=text)
            item = item.model_copy(update={"status": status, "arguments": text})
        yield self._event("output_item.done", output_index=len(self._done), item=item)
        self._open = None
        self._done.append(item)

    def _item_event(self, kind: str, **fields: Any) -> ResponseEvent:  # Any: fields of ResponseEvent
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._done), **fields)

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:  # as above
        event = ResponseEvent(type=f"response.{kind}", sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
    )
