"""Tags of `{% generation %}` in a chat template: what they hold, beside the answers that comparing found.

Whether they hold a header, white space or control tokens does not matter; any other difference is refused.
"""

import re
from collections.abc import Callable, Sequence

from penstock.core.errors import UsageError
from penstock.text.chat_template import ANSWER_MARKS, Messages

Span = tuple[int, int]
"""First and past-the-last character."""

_CORRECT = "Correct the tags, or remove all of them: answers are then found by comparing."


def tagged(render: Callable[[Messages], str], messages: Messages, text: str) -> list[Span]:
    """Return the spans of a text within `{% generation %}` tags.

    Raises:
        UsageError: with the tags, the template writes another text.
    """
    opening, closing = tuple(ANSWER_MARKS)
    found: list[Span] = []
    plain: list[str] = []
    at, start = 0, None
    for part in re.split(f"([{ANSWER_MARKS}])", render(messages)):
        if part == opening and start is None:
            start = at
        elif part == closing and start is not None:
            found.append((start, at))
            start = None
        elif part in (opening, closing):
            raise UsageError("The template's {% generation %} tags are nested", fix=_CORRECT)
        else:
            plain.append(part)
            at += len(part)
    if "".join(plain) != text or start is not None:
        raise UsageError("The template changes the text between its {% generation %} tags", fix=_CORRECT)
    return found


def within_tags(tagged: Sequence[Span], turn: Span, content: Span, text: str, index: int) -> tuple[Span, ...]:
    """Return the parts of a turn that are within the tags, with its end-of-turn token.

    Raises:
        UsageError: the tags leave out some of its content.
    """
    learned, at = [], turn[0]
    for first, past in tagged:
        first, past = max(first, at), min(past, turn[1])
        if first < past:
            if text[max(at, content[0]) : min(first, content[1])].strip():
                break
            learned.append((first, past))
            at = past
    if not learned or text[max(at, content[0]) : content[1]].strip():
        raise UsageError(
            f"The template's {{% generation %}} tags leave out text of the assistant's turn, message "
            f"{index + 1}",
            fix=_CORRECT,
        )
    if learned[-1][1] < turn[1]:
        learned.append((learned[-1][1], turn[1]))
    return tuple(learned)


def check_rest_of_tags(
    tagged: Sequence[Span], turns: Sequence[Span], text: str, control: re.Pattern[str]
) -> None:
    """Refuse tags that hold text of no answer.

    Args:
        turns: the answers with their headers, ascending.

    Raises:
        UsageError: with that text.
    """
    for first, past in tagged:
        at = first
        for start, end in [*turns, (past, past)]:
            rest = control.sub("", text[at : min(start, past)]).strip()
            if rest:
                raise UsageError(
                    "The template's {% generation %} tags hold text that is no turn of the assistant",
                    got=rest[:60],
                    fix=_CORRECT,
                )
            at = max(at, end)
