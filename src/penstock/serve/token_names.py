"""How tokens are written in log-probabilities."""

from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cached_property

from penstock.engine.request import TokenLogprob
from penstock.serve.schema import chat_reply as chat
from penstock.serve.schema.completions import CompletionLogprobs
from penstock.text.token_bytes import spellings
from penstock.text.tokenizer import Tokenizer

_LOWEST = -9999.0
"""For a token that cannot come: JSON has no minus infinity."""


class TokenNames:
    """The text of single tokens; a part of a character is U+FFFD, and its bytes say which.

    Args:
        tokenizer: whose ids are named.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def name(self, token: int) -> str:
        """Return the text of one token, with the space before a word; of special tokens, their name."""
        return self._named(token)[0]

    def _named(self, token: int) -> tuple[str, list[int] | None]:
        """Return name and bytes; None: not known, in a vocabulary of a rare kind."""
        if token not in self._known:
            spelled = (self._spelled or {}).get(token)
            if spelled:
                self._known[token] = spelled.decode(errors="replace"), list(spelled)
            else:
                name = self._tokenizer.decode([token], special=True)
                self._known[token] = name, None if "\ufffd" in name else list(name.encode())
        return self._known[token]

    def learn(self) -> None:
        """Read the vocabulary, if it has not been: slow for large ones, so not for the event loop."""
        _ = self._spelled

    @cached_property
    def _spelled(self) -> dict[int, bytes] | None:
        return spellings(self._tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of a prompt."""
        return self._tokenizer.decode(tokens)

    def written(self, token: int) -> bytes:
        """Return what a token adds to a text; nothing, if it is a special one."""
        spelled = (self._spelled or {}).get(token)
        return self.text([token]).encode() if spelled is None else spelled

    def for_chat(self, logprobs: Sequence[TokenLogprob]) -> chat.ChatLogprobs:
        """Return log-probabilities as chats have them."""
        return chat.ChatLogprobs(content=[self._chat_entry(one) for one in logprobs])

    def for_completion(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], *, offsets: "Offsets"
    ) -> CompletionLogprobs:
        """Return log-probabilities as completions have them.

        Args:
            logprobs: one per token; None: not known, as of a prompt's first.
            offsets: of the choice; told these tokens.
        """
        return CompletionLogprobs(
            tokens=[self.name(token) for token in token_ids],
            token_logprobs=[None if one is None else max(one.logprob, _LOWEST) for one in logprobs],
            top_logprobs=[None if one is None else self._table(one) for one in logprobs],
            text_offset=[offsets.push(self.written(token)) for token in token_ids],
        )

    def _table(self, one: TokenLogprob) -> dict[str, float]:
        table = {self.name(one.token): max(one.logprob, _LOWEST)}
        for token, value in one.top.items():  # parts of characters have one name: the likeliest keeps it
            table.setdefault(self.name(token), max(value, _LOWEST))
        return table

    def _chat_entry(self, one: TokenLogprob) -> chat.TokenLogprob:
        own = self._top(one.token, one.logprob)
        others = [self._top(token, value) for token, value in one.top.items()]
        return chat.TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=others)

    def _top(self, token: int, logprob: float) -> chat.TopLogprob:
        name, exact = self._named(token)
        return chat.TopLogprob(token=name, logprob=max(logprob, _LOWEST), bytes=exact)


class Offsets:
    """Where the tokens of a text begin in it, in characters; parts of a character where that one does.

    >>> offsets = Offsets()
    >>> [offsets.push(part) for part in ("größer ".encode(), b"\\xe6", b"\\x97", b"\\xa5", b"!")]
    [0, 7, 7, 7, 8]
    """

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def push(self, written: bytes) -> int:
        """Take the bytes of the next token; return where it begins."""
        has_begun = bool(self._decoder.getstate()[0])
        text = self._decoder.decode(written)
        broke_off = has_begun and text.startswith("\ufffd")  # what had begun was no character
        begin = self._at + broke_off
        self._at += len(text)
        return begin
