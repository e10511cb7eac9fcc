"""Thoughts told from what is said, wherever the text is cut."""

import pytest

from penstock.serve.chat.reasoning import ReasoningReader


def split(text, *, is_open, size):
    reader = ReasoningReader(is_open=is_open)
    parts = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    parts.append(reader.close())
    return tuple("".join(column) for column in zip(*parts, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "thought", "said"),
    [
        ("<think>Hm.</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>a < b </ c</think>Yes.\n", False, "a < b </ c", "Yes.\n"),
        ("Hm.</think>Yes. <think>no</think>", True, "Hm.", "Yes. <think>no</think>"),
        ("Yes. <think>", False, "", "Yes. <think>"),
        ("<thin", False, "", "<thin"),
        ("\n Yes.", False, "", "\n Yes."),
        ("<think>cut</th", False, "cut</th", ""),
        ("cut", True, "cut", ""),
        ("<think></think>\n\n", False, "", ""),
        ("", False, "", ""),
    ],
)
def test_thoughts_come_first_and_between_their_marks(text, is_open, thought, said, size):
    assert split(text, is_open=is_open, size=size) == (thought, said)
