"""Tables of results and of their differences, as text; no torch."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.evaluation.compare import Difference

_ARROWS = {True: "↑", False: "↓"}


def results_table(results: Mapping[str, Any]) -> Iterator[str]:  # Any: JSON values
    """Yield the lines of a table: a row for each metric of each task.

    >>> acc = {"acc,none": 0.5, "acc_stderr,none": 0.05, "sample_len": 101}
    >>> found = {"results": {"mine": acc}, "n-shot": {"mine": 5}, "higher_is_better": {"mine": {"acc": True}}}
    >>> print("\\n".join(results_table(found)))
    task  shots  questions  metric   value  stderr
    mine  5            101  acc ↑   0.5000  0.0500
    """
    rows = [("task", "shots", "questions", "metric", "value", "stderr")]
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            name, _, chosen = key.partition(",")
            if not chosen or name.endswith("_stderr"):
                continue
            arrow = _ARROWS.get(results.get("higher_is_better", {}).get(task, {}).get(name), "")
            label = f"{name} {arrow}".strip() + ("" if chosen == "none" else f" ({chosen})")
            shots = str(results.get("n-shot", {}).get(task, ""))
            stderr = metrics.get(f"{name}_stderr,{chosen}")
            rows.append(
                (task, shots, f"{metrics.get('sample_len', '')}", label, _shown(value), _shown(stderr))
            )
    yield from _lines(rows, right=(2, 4, 5))


def scores_of(results: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Return "TASK METRIC" -> its value and standard error, None if unknown.

    >>> scores_of({"results": {"mine": {"alias": "mine", "acc,none": 0.5, "acc_stderr,none": "N/A"}}})
    {'mine acc': (0.5, None)}
    """
    found: dict[str, tuple[float, float | None]] = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            name, _, chosen = key.partition(",")
            if not chosen or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = metrics.get(f"{name}_stderr,{chosen}")
            label = f"{task} {name}" if chosen == "none" else f"{task} {name} ({chosen})"
            found[label] = value, error if isinstance(error, int | float) else None
    return found


def differences_table(found: Sequence[Difference]) -> Iterator[str]:
    """Yield the lines of a table: both values, what the second has more, and its standard error.

    >>> one = Difference(task="mine", metric="acc,none", first=0.5, second=0.6, stderr=0.02, num_pairs=100)
    >>> print("\\n".join(differences_table([one])))
    task  metric   first  second  difference  stderr    z  questions
    mine  acc     0.5000  0.6000     +0.1000  0.0200  5.0  100 paired
    """
    rows = [("task", "metric", "first", "second", "difference", "stderr", "z", "questions")]
    for one in found:
        name, _, chosen = one.metric.partition(",")
        label = name if chosen == "none" else f"{name} ({chosen})"
        z = f"{one.delta / one.stderr:.1f}" if one.stderr else "-"
        paired = f"{one.num_pairs} paired" if one.num_pairs else "not paired"
        values = (_shown(one.first), _shown(one.second), f"{one.delta:+.4f}", _shown(one.stderr))
        rows.append((one.task, label, *values, z, paired))
    yield from _lines(rows, right=(2, 3, 4, 5, 6))


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def _lines(rows: Sequence[tuple[str, ...]], *, right: Sequence[int]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()
