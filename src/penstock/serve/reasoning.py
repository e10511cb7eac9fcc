"""What a model thinks, told from its answer while the text streams; pure.

A model thinks between `<think>` and `</think>`, before everything else (Qwen 3, DeepSeek R1 and many others);
where its chat template has written the first mark already, the answer begins inside. What was cut before the
second mark is all thought.
"""

from typing import TYPE_CHECKING, Literal

from penstock.engine.request import Request

if TYPE_CHECKING:
    from penstock.serve.served import Served

OPEN, CLOSE = "<think>", "</think>"
_LAST_TOKENS = 8
"""Of a prompt, among which a template's mark is."""


class ReasoningReader:
    """Splits one answer into what was thought and what is said.

    Args:
        is_open: it begins inside of a thought.

    >>> reader = ReasoningReader(is_open=False)
    >>> reader.push("<think>Hm. </thi"), reader.push("nk>" + chr(10)), reader.push("Yes.")
    (('Hm. ', ''), ('', ''), ('', 'Yes.'))
    """

    def __init__(self, *, is_open: bool) -> None:
        self._state: Literal["begins", "thinks", "says_first", "says"] = "thinks" if is_open else "begins"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Take text; return what of it is certain to be thought, and said."""
        text, self._held = self._held + text, ""
        if self._state == "begins":
            begin = text.lstrip()
            if OPEN.startswith(begin) and begin != OPEN:
                self._held = text
                return "", ""
            self._state = "thinks" if begin.startswith(OPEN) else "says"
            text = begin.removeprefix(OPEN) if self._state == "thinks" else text
        if self._state != "thinks":
            return "", self._said(text)
        thought, mark, said = text.partition(CLOSE)
        if mark:
            self._state = "says_first"
            return thought, self._said(said)
        keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], ""

    def close(self) -> tuple[str, str]:
        """Return what was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "thinks" else ("", held)

    def _said(self, text: str) -> str:
        if self._state == "says_first":  # newlines there part the two
            text = text.lstrip("\n")
            self._state = "says" if text else "says_first"
        return text


def reasoning_of(asked: Request, served: "Served") -> ReasoningReader | None:
    """Return what splits one of a request's answers; None: it is not to, or a grammar lets none be."""
    if not served.splits_reasoning or asked.grammar is not None:
        return None
    end = served.words.tokenizer.decode(asked.prompt[-_LAST_TOKENS:], special=True)
    return ReasoningReader(is_open=end.rstrip().endswith(OPEN))
