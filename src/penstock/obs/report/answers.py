"""The samples of a run as a table: prompts down, steps across; what one reads before any curve."""

from html import escape

from penstock.obs.report.history import History, SampleAnswer, SampleSet
from penstock.obs.report.html import table

_SHOWN = 4
"""Columns of answers that a page has room for: the first, the last, and two between."""


_LONG, _LONG_LINES = 200, 10
"""Characters and lines from which a text may be higher than its cell shows."""


def samples_section(history: History) -> str:
    """Return the section of the samples as HTML; "" if none were recorded."""
    sets = history.samples
    if not sets:
        return ""
    prompts = [answer.prompt for answer in sets[-1].answers]
    shown = spread(len(sets), _SHOWN)
    columns = [sets[index] for index in shown]
    steps = "".join(f'<th scope="col">{escape(_at(column.step))}</th>' for column in columns)
    has_reference = any(answer.reference for answer in sets[-1].answers)
    reference = '<th scope="col">the document itself</th>' if has_reference else ""
    rows = "".join(_row(prompt, columns, has_reference=has_reference) for prompt in prompts)
    left = "" if len(columns) == len(sets) else _all_answers(prompts, sets)
    head = f'<thead><tr><th scope="col">prompt</th>{steps}{reference}</tr></thead>'
    answers = table("What it answers", f"{head}<tbody>{rows}</tbody>")
    return f'<section class="samples"><h2>What it answers</h2>{answers}{left}</section>'


def spread(number: int, most: int) -> list[int]:
    """Return at most `most` of the indices below `number`, evenly spread, the first and last among them.

    >>> spread(9, 4), spread(2, 4), spread(1, 4)
    ([0, 3, 5, 8], [0, 1], [0])
    """
    if number <= most:
        return [*range(number)]
    return [round(index * (number - 1) / (most - 1)) for index in range(most)]


def _at(step: int) -> str:
    return f"step {step:,}" if step else "before"


def _row(prompt: str, columns: list[SampleSet], *, has_reference: bool) -> str:
    found = [_of(prompt, column) for column in columns]
    cells = "".join(
        _cell(_at(column.step), answer.answer if answer else "", cut=answer is not None and answer.is_cut)
        for column, answer in zip(columns, found, strict=True)
    )
    last = found[-1]
    reference = _cell("the document itself", (last.reference if last else "") or "") if has_reference else ""
    return f'<tr><th scope="row">{_text(prompt)}</th>{cells}{reference}</tr>'


def _step_row(title: str, answer: SampleAnswer) -> str:
    return f'<tr><th scope="row">{escape(title)}</th>{_cell(title, answer.answer, cut=answer.is_cut)}</tr>'


def _of(prompt: str, column: SampleSet) -> SampleAnswer | None:
    return next((answer for answer in column.answers if answer.prompt == prompt), None)


def _cell(title: str, text: str, *, cut: bool = False) -> str:
    if not text and not cut:
        return "<td></td>"
    more = '<span class="cut" title="The answer reached samples.max_tokens">\u2026</span>' if cut else ""
    return f'<td data-title="{escape(title)}">{_text(text, more)}</td>'


def _text(text: str, more: str = "") -> str:
    """Return a text that scrolls inside itself if it is long, by the keyboard too."""
    reached = ' tabindex="0"' if len(text) > _LONG or text.count("\n") > _LONG_LINES else ""
    return f"<pre{reached}>{escape(text)}{more}</pre>"


def _all_answers(prompts: list[str], sets: tuple[SampleSet, ...]) -> str:
    parts = []
    for prompt in prompts:
        found = [(column.step, _of(prompt, column)) for column in sets]
        rows = "".join(_step_row(_at(step), answer) for step, answer in found if answer is not None)
        parts.append(f"<h3><pre>{escape(prompt)}</pre></h3><table><tbody>{rows}</tbody></table>")
    return f"<details><summary><h2>All {len(sets)} answers to each</h2></summary>{''.join(parts)}</details>"
