"""Incremental detokenizer: tokens to whole characters, up to a stop text.

A character may span tokens, and some decoders treat the first token of a text differently. So the new text is
what decoding adds to the text of the tokens before it, held back while it ends in U+FFFD, to which an
incomplete character decodes. After `_MAX_PENDING` tokens the bytes are invalid UTF-8 and are output as
U+FFFD. The end of the text is also held back while it could be the beginning of a stop text.
"""

from collections.abc import Callable, Mapping, Sequence

_MAX_PENDING = 8
"""An incomplete character is at most three tokens; so of more tokens, only the last three can be pending."""


class TextStream:
    """Incremental decoder: the texts it returns join to the text of all tokens.

    Args:
        decode: ids -> text, with U+FFFD for invalid UTF-8.
        stop_texts: texts that end the stream and are not part of it.
        shown: id -> name of special tokens that are output as text.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stop_texts: Sequence[str] = (),
        shown: Mapping[int, str] | None = None,
    ) -> None:
        self._decode = decode
        self._stop_texts = stop_texts
        self._shown = shown or {}
        self._context: list[int] = []
        self._before = ""  # the text of the context
        self._pending: list[int] = []
        self._held = ""
        self.stop_text: str | None = None
        """The stop text that was found; later text is dropped."""

    @property
    def stopped(self) -> bool:
        """True if a stop text was found."""
        return self.stop_text is not None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add one token; return the text that is now final, which may be empty.

        Args:
            may_stop: False: a stop text that ends here is ordinary text.
        """
        if token in self._shown:  # an incomplete character before it stays incomplete
            text, num_certain = self._new_text() + self._shown[token], len(self._pending)
        else:
            self._pending.append(token)
            text, num_certain = self._new_text(), len(self._pending)
            if text.endswith("\ufffd"):
                if num_certain < _MAX_PENDING:
                    return ""
                num_certain, text = self._certain()
        self._go_on_after(self._pending[:num_certain])
        del self._pending[:num_certain]
        if not may_stop or not self._stop_texts:
            return text
        return self._until_stop(text, is_last=False)

    def close(self) -> str:
        """Return the text that was held back."""
        text, self._pending = self._new_text(), []
        return self._until_stop(text, is_last=True)

    def _go_on_after(self, told: list[int]) -> None:
        """Make output tokens the context if they have text: after a control token no word is the first
        one."""
        if self._before and not self._decode(told):
            return
        self._context = told if self._before else [*self._context, *told][-_MAX_PENDING:]
        self._before = self._decode(self._context)

    def _new_text(self) -> str:
        return self._decode([*self._context, *self._pending])[len(self._before) :]

    def _certain(self) -> tuple[int, str]:
        """Return how many pending tokens are final, up to a character boundary, and their text."""
        whole = self._decode([*self._context, *self._pending])
        for num in range(len(self._pending) - 3, len(self._pending)):
            known = self._decode([*self._context, *self._pending[:num]])
            if known + self._decode(self._pending[num:]) == whole:
                return num, known[len(self._before) :]
        return len(self._pending), whole[len(self._before) :]

    def _until_stop(self, text: str, *, is_last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at, stop) for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if found:
            end, self.stop_text = min(found, key=lambda one: one[0])
            self._held = ""
            return text[:end]
        keep = 0 if is_last else max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`.

    >>> _overlap("and\\nUs", "\\nUser:")
    3
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
