"""Chat writer: engine deltas of one answer to chunks of a chat message with content and tool calls."""

import secrets
from collections.abc import Collection

from penstock.engine.request import OutputDelta
from penstock.serve.chat.json_scan import is_object
from penstock.serve.chat.reasoning import ReasoningReader
from penstock.serve.chat.streamed_calls import CallDelta
from penstock.serve.chat.tool_parsers import Call
from penstock.serve.chat.tools import Said, ToolReader, ToolUse, Unmarked, cut_call
from penstock.serve.output_stream import stop_reason
from penstock.serve.schema.chat import (
    ChatChoice,
    ChatFinish,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    DeltaFunction,
    DeltaToolCall,
    ReplyFunction,
    ReplyMessage,
    ReplyToolCall,
)
from penstock.serve.token_strings import TokenNames


class ChatWriter:
    """Writes one answer.

    Args:
        use: tools of the request; without allowed tools all text is content.
        unmarked: what JSON without the markers of a call is.
        reasoning: splits reasoning from content; None: everything is content.
        echo: text before the content.
        as_ids: name tokens in log-probabilities by their ids.
        wants_ids: return token ids too.
        stop_ids: stop tokens that the request names.
        streams: return arguments as they come; False: calls are returned whole.
    """

    def __init__(
        self,
        index: int,
        *,
        names: TokenNames | None,
        use: ToolUse,
        unmarked: Unmarked = "calls",
        reasoning: ReasoningReader | None = None,
        echo: str = "",
        as_ids: bool = False,
        wants_ids: bool = False,
        stop_ids: Collection[int] = (),
        streams: bool,
    ) -> None:
        self._index = index
        self._names = names
        reads = use.allowed and use.forced is None
        self._reader = ToolReader(use.schemas, streams=streams, unmarked=unmarked) if reads else None
        self._use = use
        self._reasoning = reasoning
        self._num_calls = 0
        self._arguments: list[str] = []  # of the last call
        self._is_whole = True  # of the calls before it
        self._echo = echo
        self._as_ids = as_ids
        self._wants_ids = wants_ids
        self._stop_ids = stop_ids

    def begin(self) -> ChunkChoice:
        """Return the chunk before any text."""
        content = self._echo or (None if self._use.allowed else "")
        return ChunkChoice(index=self._index, delta=Delta(role="assistant", content=content))

    def take(self, piece: OutputDelta) -> ChunkChoice:
        """Return the chunk of one delta."""
        is_last = piece.finish is not None
        thought, text = self._thought(piece.text, is_last)
        reason = stop_reason(piece, self._stop_ids)
        is_cut = piece.finish == "length" or reason is not None
        if self._use.forced is not None:
            call = self._call(CallDelta(text, None if self._num_calls else self._use.forced))
            delta = Delta(tool_calls=[call])
        else:
            delta = self._delta(self._said(text, is_last=is_last, is_cut=is_cut, stop=reason))
        delta.reasoning_content = thought or None
        finish: ChatFinish | None = None
        if is_last:
            has_calls = self._num_calls > 0 and self._calls_are_whole()
            finish = "length" if piece.finish == "length" else "tool_calls" if has_calls else "stop"
        return ChunkChoice(
            index=self._index,
            delta=delta,
            logprobs=self._logprobs(piece),
            finish_reason=finish,
            stop_reason=reason,
            token_ids=list(piece.token_ids) if self._wants_ids else None,
        )

    def _thought(self, text: str, is_last: bool) -> tuple[str, str]:
        if self._reasoning is None:
            return "", text
        thought, said = self._reasoning.push(text)
        if is_last:
            rest = self._reasoning.close()
            thought, said = thought + rest[0], said + rest[1]
        return thought, said

    def _said(self, text: str, *, is_last: bool, is_cut: bool, stop: int | str | None) -> Said:
        if self._reader is None:
            return Said(content=text)
        said = self._reader.push(text)
        if is_last:
            rest = self._reader.close(is_cut=is_cut, stop=stop)
            said = Said(said.content + rest.content, said.calls + rest.calls)
        if not (self._use.must_call and is_last and is_cut):
            return said
        # What is left of a required call that was cut is no content.
        begun = None if said.calls or self._num_calls else cut_call(said.content, list(self._use.schemas))
        return Said(calls=said.calls if begun is None else (begun,))

    def _delta(self, said: Said) -> Delta:
        calls = [self._call(delta) for delta in said.calls]
        return Delta(content=said.content or None, tool_calls=calls or None)

    def _calls_are_whole(self) -> bool:
        """Return whether the arguments of all calls so far are JSON objects."""
        return self._is_whole and is_object("".join(self._arguments))

    def _call(self, delta: CallDelta) -> DeltaToolCall:
        if delta.name is None:
            self._arguments.append(delta.arguments)
            function = DeltaFunction(arguments=delta.arguments)
            return DeltaToolCall(index=self._num_calls - 1, function=function)
        self._is_whole = self._num_calls == 0 or self._calls_are_whole()
        self._num_calls += 1
        self._arguments = [delta.arguments]
        return DeltaToolCall(
            index=self._num_calls - 1,
            id=f"call_{secrets.token_hex(12)}",
            type="function",
            function=DeltaFunction(name=delta.name, arguments=delta.arguments),
        )

    def _logprobs(self, piece: OutputDelta) -> ChatLogprobs | None:
        return None if self._names is None else self._names.for_chat(piece.logprobs, as_ids=self._as_ids)


def joined(index: int, pieces: list[ChunkChoice]) -> ChatChoice:
    """Return the complete answer of these chunks."""
    content = "".join(piece.delta.content or "" for piece in pieces)
    thoughts = "".join(piece.delta.reasoning_content or "" for piece in pieces)
    calls: list[Call] = []
    ids: list[str] = []
    for delta in (delta for piece in pieces for delta in piece.delta.tool_calls or ()):
        if delta.id is not None:
            ids.append(delta.id)
            calls.append(Call(delta.function.name or "", delta.function.arguments))
        else:
            calls[-1] = Call(calls[-1].name, calls[-1].arguments + delta.function.arguments)
    logprobs = [piece.logprobs.content or [] for piece in pieces if piece.logprobs is not None]
    token_ids = [piece.token_ids for piece in pieces if piece.token_ids is not None]
    finish = pieces[-1].finish_reason
    assert finish is not None, "the last chunk has a finish reason"
    return ChatChoice(
        index=index,
        message=ReplyMessage(
            content=None if calls and not content.strip() else content,
            reasoning_content=thoughts or None,
            tool_calls=[
                ReplyToolCall(id=call_id, function=ReplyFunction(name=call.name, arguments=call.arguments))
                for call_id, call in zip(ids, calls, strict=True)
            ]
            or None,
        ),
        logprobs=ChatLogprobs(content=[entry for one in logprobs for entry in one]) if logprobs else None,
        finish_reason=finish,
        stop_reason=pieces[-1].stop_reason,
        token_ids=[token for some in token_ids for token in some] if token_ids else None,
    )
