"""Token strings, for log-probabilities."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from functools import cached_property

from penstock.engine.request import TokenLogprob
from penstock.serve.schema import chat
from penstock.serve.schema.base import PromptLogprob, PromptLogprobs
from penstock.serve.schema.completions import CompletionLogprobs
from penstock.text.token_bytes import spellings
from penstock.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""Log-probability of an impossible token: JSON has no minus infinity."""


class TokenNames:
    """Strings of single tokens; a part of a character is U+FFFD, with its bytes in `bytes`.

    Args:
        tokenizer: tokenizer of the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def name(self, token: int) -> str:
        """Return the text of one token, with a leading space if it has one; special tokens have their
        name."""
        return self._named(token)[0]

    def _named(self, token: int) -> tuple[str, list[int] | None]:
        """Return text and bytes; bytes are None if unknown, for rare kinds of vocabularies."""
        if token not in self._known:
            spelled = (self._spelled or {}).get(token)
            if spelled:
                self._known[token] = spelled.decode(errors="replace"), list(spelled)
            else:
                name = self._tokenizer.decode([token], special=True)
                self._known[token] = name, None if "\ufffd" in name else list(name.encode())
        return self._known[token]

    def learn(self) -> None:
        """Read the vocabulary once; slow for large ones, so not for the event loop."""
        _ = self._spelled

    @cached_property
    def _spelled(self) -> dict[int, bytes] | None:
        return spellings(self._tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt."""
        return self._tokenizer.decode(tokens)

    def written(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; empty for special tokens."""
        spelled = (self._spelled or {}).get(token)
        return self.text([token]).encode() if spelled is None else spelled

    def for_chat(self, logprobs: Sequence[TokenLogprob], *, as_ids: bool = False) -> chat.ChatLogprobs:
        """Return log-probabilities in the chat format.

        Args:
            as_ids: name tokens by their ids.
        """
        return chat.ChatLogprobs(content=[self._chat_entry(one, as_ids) for one in logprobs])

    def for_completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        *,
        offsets: "Offsets",
        as_ids: bool = False,
    ) -> CompletionLogprobs:
        """Return log-probabilities in the completions format.

        Args:
            logprobs: one per token; None: unknown, as for the first prompt token.
            offsets: of the choice; these tokens are added to it.
            as_ids: name tokens by their ids.
        """
        name = _name_of_id if as_ids else self.name
        return CompletionLogprobs(
            tokens=[name(token) for token in token_ids],
            token_logprobs=[None if one is None else max(one.logprob, _LOWEST) for one in logprobs],
            top_logprobs=[None if one is None else _table(one, name) for one in logprobs],
            text_offset=[offsets.push(self.written(token)) for token in token_ids],
        )

    def for_prompt(self, logprobs: Sequence[TokenLogprob | None]) -> PromptLogprobs:
        """Return log-probabilities of a prompt: each token and its likeliest alternatives."""
        return [None if one is None else self._prompt_entry(one) for one in logprobs]

    def _prompt_entry(self, one: TokenLogprob) -> dict[int, PromptLogprob]:
        likely = {token: (value, rank) for rank, (token, value) in enumerate(one.top.items(), 1)}
        return {
            token: PromptLogprob(logprob=max(value, _LOWEST), rank=rank, decoded_token=self.name(token))
            for token, (value, rank) in {**likely, one.token: (one.logprob, one.rank)}.items()
        }

    def _chat_entry(self, one: TokenLogprob, as_ids: bool) -> chat.ChatTokenLogprob:
        own = self._top(one.token, one.logprob, as_ids)
        others = [self._top(token, value, as_ids) for token, value in one.top.items()]
        return chat.ChatTokenLogprob(
            token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=others
        )

    def _top(self, token: int, logprob: float, as_ids: bool) -> chat.TopLogprob:
        name, exact = self._named(token)
        name = _name_of_id(token) if as_ids else name
        return chat.TopLogprob(token=name, logprob=max(logprob, _LOWEST), bytes=exact)


def _name_of_id(token: int) -> str:
    return f"token_id:{token}"


def _table(one: TokenLogprob, name: Callable[[int], str]) -> dict[str, float]:
    table = {name(one.token): max(one.logprob, _LOWEST)}
    for token, value in one.top.items():  # parts of characters share a name: the likeliest keeps it
        table.setdefault(name(token), max(value, _LOWEST))
    return table


class Offsets:
    """Character offsets of tokens in a text; parts of a character have the offset of that character.

    >>> offsets = Offsets()
    >>> [offsets.push(part) for part in ("größer ".encode(), b"\\xe6", b"\\x97", b"\\xa5", b"!")]
    [0, 7, 7, 7, 8]
    """

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def push(self, written: bytes) -> int:
        """Add the bytes of the next token; return its offset."""
        has_begun = bool(self._decoder.getstate()[0])
        text = self._decoder.decode(written)
        broke_off = has_begun and text.startswith("\ufffd")  # the incomplete character was invalid
        begin = self._at + broke_off
        self._at += len(text)
        return begin
