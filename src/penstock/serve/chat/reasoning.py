"""Reasoning parser: splits reasoning from the answer while the text streams; pure.

A model reasons between `<think>` and `</think>`, before everything else (Qwen 3, DeepSeek R1 and many
others); if its chat template has already written the first tag, the answer starts inside. Text cut off before
the second tag is all reasoning.
"""

from typing import TYPE_CHECKING, Literal

from penstock.engine.request import Request

if TYPE_CHECKING:
    from penstock.serve.state import ModelInfo


MARKS = OPEN, CLOSE = "<think>", "</think>"
_LAST_TOKENS = 8
"""Last tokens of a prompt in which the template's tag may be."""


class ReasoningReader:
    """Splits one answer into reasoning and content.

    Args:
        is_open: True: the answer starts inside the reasoning.

    >>> reader = ReasoningReader(is_open=False)
    >>> reader.push("<think>Hm. </thi"), reader.push("nk>" + chr(10)), reader.push("Yes.")
    (('Hm. ', ''), ('', ''), ('', 'Yes.'))
    """

    def __init__(self, *, is_open: bool) -> None:
        self._state: Literal["begins", "thinks", "says_first", "says"] = "thinks" if is_open else "begins"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return the new (reasoning, content) that is certain."""
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
        """Return the (reasoning, content) that was held back."""
        held, self._held = self._held, ""
        return (held, "") if self._state == "thinks" else ("", held)

    def _said(self, text: str) -> str:
        if self._state == "says_first":  # newlines after the reasoning are a separator
            text = text.lstrip("\n")
            self._state = "says" if text else "says_first"
        return text


def reasoning_of(asked: Request, served: "ModelInfo") -> ReasoningReader | None:
    """Return a parser for one answer; None: reasoning is not split, or a grammar excludes it."""
    if not served.splits_reasoning or asked.grammar is not None:
        return None
    end = served.text_processor.tokenizer.decode(asked.prompt[-_LAST_TOKENS:], special=True)
    return ReasoningReader(is_open=end.rstrip().endswith(OPEN))
