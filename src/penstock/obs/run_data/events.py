"""Events of a run, drawn on the axis of its curves: starts, skips, changes of data, requests, spikes."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from penstock.core.toml import plain
from penstock.core.units import plural
from penstock.obs.sinks import Record

Kind = Literal["start", "resume", "rescale", "skip", "mixture", "spike", "stop", "request"]

_BLOCK = 64
"""Steps whose median and spread are the norm for those after them."""
_DEVIATIONS = 10.0
_LEAST = 0.2
"""Nats above the median below which nothing is a spike."""
_MAX_SPIKES = 100


class RunEvent(TypedDict):
    """One event."""

    step: int
    time: str | None
    """ISO 8601, UTC; None: not recorded."""
    kind: Kind
    text: str


def event_of(record: Record, *, ranks_before: int | None) -> RunEvent | None:
    """Return the event that a record tells of; None: it tells of none that is drawn.

    Args:
        ranks_before: ranks of the start before it; None: there was none.

    >>> event_of({"event": "skipped", "step": 7, "why": "loss is NaN"}, ranks_before=2)
    {'step': 7, 'time': None, 'kind': 'skip', 'text': 'loss is NaN'}
    """
    kind, step = record.get("event"), record.get("step")
    if not isinstance(step, int):
        return None
    match kind:
        case "start":
            return _start(record, step, ranks_before)
        case "skipped":
            return RunEvent(step=step, time=None, kind="skip", text=str(record.get("why", "")))
        case "mixture":
            said = ": ".join(filter(None, (_shares(record.get("weights")), str(record.get("reason", "")))))
            return RunEvent(step=step, time=None, kind="mixture", text=said)
        case "sequence_length":
            said = f"sequence length {record.get('before')} -> {record.get('after')}"
            return RunEvent(step=step, time=None, kind="mixture", text=said)
        case "early_stop":
            said = f"the held-out loss was best after step {record.get('best_step')}"
            return RunEvent(step=step, time=None, kind="stop", text=said)
        case "request":
            time, said = record.get("time"), str(record.get("said", ""))
            stops = bool(record.get("stop"))
            time = str(time) if time else None
            return RunEvent(step=step, time=time, kind="stop" if stops else "request", text=said)
    return None


def spikes(steps: npt.NDArray[np.float64], loss: npt.NDArray[np.float64]) -> list[RunEvent]:
    """Return the steps whose loss is far above that of the steps before them.

    The norm is the median of the last whole block of steps, and their median deviation from it.

    Args:
        steps: [n] numbers of the steps.
        loss: [n] nats; NaN where unknown.
    """
    whole = len(loss) // _BLOCK * _BLOCK
    if whole < len(loss) and whole:
        blocks = loss[:whole].reshape(-1, _BLOCK)
    elif whole > _BLOCK:
        blocks = loss[: whole - _BLOCK].reshape(-1, _BLOCK)
    else:
        return []
    blocks = np.where(np.isfinite(blocks), blocks, np.inf)  # a block of NaN is the norm of nothing
    middle = np.median(blocks, axis=1)
    with np.errstate(invalid="ignore"):
        spread = np.median(np.abs(blocks - middle[:, None]), axis=1)
        norm = np.repeat(middle + np.maximum(_DEVIATIONS * spread, _LEAST), _BLOCK)
    later = loss[_BLOCK:]
    norm = np.append(norm, np.full(max(0, len(later) - len(norm)), norm[-1]))[: len(later)]
    found = np.flatnonzero(later > norm) + _BLOCK
    first = found[np.diff(found, prepend=-2) > 1][-_MAX_SPIKES:]  # of neighbours, the first
    return [RunEvent(step=int(steps[i]), time=None, kind="spike", text=f"loss {loss[i]:.3f}") for i in first]


def first_compared(row: int) -> int:
    """Return the first row whose loss decides which of the rows from one on are spikes.

    >>> first_compared(1000)
    896
    """
    return max(0, row // _BLOCK - 1) * _BLOCK


def _start(record: Record, step: int, ranks_before: int | None) -> RunEvent:
    ranks, changes = record.get("ranks"), record.get("changes") or {}
    said = plural(ranks, "rank") if isinstance(ranks, int) else "start"
    kind: Kind = "start" if ranks_before is None else "resume"
    if ranks_before is not None and isinstance(ranks, int) and ranks != ranks_before:
        kind, said = "rescale", f"{ranks_before} -> {plural(ranks, 'rank')}"
    if changes:
        said += f"; changed: {', '.join(_changes(changes))}"
    time = record.get("time")
    return RunEvent(step=step, time=str(time) if time else None, kind=kind, text=said)


def _changes(changes: Any) -> list[str]:  # Any: JSON
    """Return the changed settings; of one, its values too.

    >>> _changes({"run.steps": [60, 80]}), _changes({"run.steps": [60, 80], "compute": ["a", "b"]})
    (['run.steps 60 -> 80'], ['run.steps', 'compute'])
    """
    names = [str(name) for name in changes]
    if len(names) != 1 or not isinstance(changes, Mapping):
        return names
    pair = changes[names[0]]
    is_pair = isinstance(pair, list) and len(pair) == 2
    return [f"{names[0]} {plain(pair[0])} -> {plain(pair[1])}"] if is_pair else names


def _shares(weights: Any) -> str:  # Any: JSON
    if not isinstance(weights, Mapping):
        return ""
    return ", ".join(
        f"{name} {share:.4g}" for name, share in weights.items() if isinstance(share, int | float)
    )
