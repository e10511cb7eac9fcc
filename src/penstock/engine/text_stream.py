"""Tokens to text as they come: whole characters only, and nothing from a stop text on.

A character may span tokens, and some decoders treat the first token of a text differently. So the
new text is what decoding adds to the text of the tokens before it, held back while it ends in
U+FFFD, which is what half a character decodes to; bytes that go on so are no text, and told as what they
decode to. Likewise the end of the text is held back while
it could be the beginning of a stop text.
"""

from collections.abc import Callable, Sequence

_MAX_PENDING = 8
"""Half a character is at most three tokens, so of more than these only the last may be one."""


class TextStream:
    """Incremental decoder; the pieces join to the text of all the tokens.

    Args:
        decode: ids -> text, with U+FFFD for bytes that are not UTF-8.
        stop_texts: texts that end the stream; they are not part of it.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], *, stop_texts: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop_texts = stop_texts
        self._context: list[int] = []
        self._before = ""  # the text of the context
        self._pending: list[int] = []
        self._held = ""
        self.stopped = False
        """Whether a stop text was met; what is pushed after is dropped."""

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Take one token; return the text that is now certain, often a word, sometimes nothing.

        Args:
            may_stop: whether a stop text that ends here counts; if not, it is text.
        """
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
        """Return what was held back."""
        text, self._pending = self._new_text(), []
        return self._until_stop(text, is_last=True)

    def _go_on_after(self, told: list[int]) -> None:
        """Make what was told the context, if it has text: behind a control token no word is a first one."""
        if self._before and not self._decode(told):
            return
        self._context = told if self._before else [*self._context, *told][-_MAX_PENDING:]
        self._before = self._decode(self._context)

    def _new_text(self) -> str:
        return self._decode([*self._context, *self._pending])[len(self._before) :]

    def _certain(self) -> tuple[int, str]:
        """Return how many pending tokens are told now, up to between two characters, and their text."""
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
        found = [at for stop in self._stop_texts if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if is_last else max((_overlap(text, stop) for stop in self._stop_texts), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`.

    >>> _overlap("and\\nUs", "\\nUser:")
    3
    """
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)
