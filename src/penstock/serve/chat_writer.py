"""Turns the pieces of one answer into what they add to a chat message: words, and calls of tools."""

import secrets

from penstock.engine.request import Piece
from penstock.serve.reasoning import ReasoningReader
from penstock.serve.schema.chat_reply import (
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
from penstock.serve.token_names import TokenNames
from penstock.serve.tool_choice import ToolUse
from penstock.serve.tool_forms import Call
from penstock.serve.tools import Said, ToolReader


class ChatWriter:
    """One answer.

    Args:
        use: of tools; where none may be called the text is only text.
        reasoning: tells thoughts from the text; None: all of it is said.
    """

    def __init__(
        self,
        index: int,
        *,
        names: TokenNames | None,
        use: ToolUse,
        reasoning: ReasoningReader | None = None,
    ) -> None:
        self._index = index
        self._names = names
        self._reader = ToolReader(use.schemas) if use.allowed and use.forced is None else None
        self._forced = use.forced
        self._reasoning = reasoning
        self._num_calls = 0

    def begin(self) -> ChunkChoice:
        """Return what comes before any piece."""
        return ChunkChoice(index=self._index, delta=Delta(role="assistant", content=""))

    def take(self, piece: Piece) -> ChunkChoice:
        """Return what a piece adds."""
        is_last = piece.finish is not None
        thought, text = self._thought(piece.text, is_last)
        delta = self._arguments(text) if self._forced else self._delta(self._said(text, is_last))
        delta.reasoning_content = thought or None
        finish: ChatFinish | None = None
        if is_last:
            finish = "length" if piece.finish == "length" else "tool_calls" if self._num_calls else "stop"
        return ChunkChoice(
            index=self._index, delta=delta, logprobs=self._logprobs(piece), finish_reason=finish
        )

    def _thought(self, text: str, is_last: bool) -> tuple[str, str]:
        if self._reasoning is None:
            return "", text
        thought, said = self._reasoning.push(text)
        if is_last:
            rest = self._reasoning.close()
            thought, said = thought + rest[0], said + rest[1]
        return thought, said

    def _said(self, text: str, is_last: bool) -> Said:
        if self._reader is None:
            return Said(content=text)
        said = self._reader.push(text)
        if is_last:
            rest = self._reader.close()
            said = Said(said.content + rest.content, said.calls + rest.calls)
        return said

    def _delta(self, said: Said) -> Delta:
        calls = [self._named(call.name, call.arguments) for call in said.calls]
        return Delta(content=said.content or None, tool_calls=calls or None)

    def _arguments(self, text: str) -> Delta:
        assert self._forced is not None
        if not self._num_calls:
            return Delta(tool_calls=[self._named(self._forced, text)])
        return Delta(tool_calls=[DeltaToolCall(index=0, function=DeltaFunction(arguments=text))])

    def _named(self, name: str, arguments: str) -> DeltaToolCall:
        self._num_calls += 1
        return DeltaToolCall(
            index=self._num_calls - 1,
            id=f"call_{secrets.token_hex(12)}",
            type="function",
            function=DeltaFunction(name=name, arguments=arguments),
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return None if self._names is None else self._names.for_chat(piece.logprobs)


def joined(index: int, pieces: list[ChunkChoice]) -> ChatChoice:
    """Return the whole answer whose pieces these are."""
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
    finish = pieces[-1].finish_reason
    assert finish is not None, "the last piece says why"
    return ChatChoice(
        index=index,
        message=ReplyMessage(
            content=None if calls and not content else content,
            reasoning_content=thoughts or None,
            tool_calls=[
                ReplyToolCall(id=call_id, function=ReplyFunction(name=call.name, arguments=call.arguments))
                for call_id, call in zip(ids, calls, strict=True)
            ]
            or None,
        ),
        logprobs=ChatLogprobs(content=[entry for one in logprobs for entry in one]) if logprobs else None,
        finish_reason=finish,
    )
