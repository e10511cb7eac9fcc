"""Audit: proves from its logs that a run trained on exactly the samples of an uninterrupted one.

Every rank logs the ids and checksums of its samples. The data order is a function, so one process can compute
the samples of each step and compare: nothing missing, repeated or changed, across kills and changes of the
number of ranks. Samples of a skipped step were read but not trained on, and are counted separately. Imports
no torch.
"""

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from penstock.checkpoint.find import find
from penstock.core.errors import UsageError
from penstock.data import Loader
from penstock.data.types import checksums
from penstock.obs.metric_names import METRICS_FILE, SAMPLES_FOLDER
from penstock.obs.sinks import Record
from penstock.obs.sinks.jsonl import read_records
from penstock.train.inspect.open_run import open_run

_SHOWN_FAULTS = 20


@dataclass(slots=True, kw_only=True)
class Audit:
    """Result of an audit."""

    steps: int
    """Steps up to the newest checkpoint; later logs are not part of the run."""
    samples: int = 0
    """Samples that are in place and unchanged, in steps that changed the weights."""
    tokens: int = 0
    """Tokens of these samples."""
    skipped_steps: int = 0
    """Steps skipped by the guard: their samples were read, the weights were not changed."""
    skipped_samples: int = 0
    """Samples of skipped steps that are in place and unchanged."""
    unchecked_samples: int = 0
    """Samples logged without checksums: their tokens were not compared."""
    ranks: list[int] = field(default_factory=list)
    """Number of ranks at each start of the run."""
    faults: list[str] = field(default_factory=list)
    """Missing, repeated or changed samples, one line per step, or one for consecutive steps without logs; the
    first ones only."""
    num_faults: int = 0
    """Number of steps with a fault."""


def audit(run: Path, *, progress: Callable[[int, int], None]) -> Audit:
    """Compare the sample logs of a run with the order of an uninterrupted one.

    Args:
        progress: called with (steps done, all steps).

    Raises:
        UsageError: the run logged no samples.
        CheckpointError: the run has no checkpoint.
    """
    logs = sorted((run / SAMPLES_FOLDER).glob("rank-*.jsonl"))
    if not run.is_dir():
        raise UsageError(f"{run} is not a folder", fix="Give the folder of a run (run.dir of its recipe).")
    if not logs:
        raise UsageError(f"{run} has no sample logs", fix="Train with --set run.log_samples=true.")
    meta = find(run).index().meta
    loader = open_run(run).loader
    events = [record for record in read_records(run / METRICS_FILE) if "event" in record]
    skipped = {e["step"] for e in events if e["event"] == "skipped" and e["step"] <= meta.step}
    starts = [event["ranks"] for event in events if event["event"] == "start"]
    result = Audit(steps=meta.step, ranks=starts, skipped_steps=len(skipped))
    by_step = groupby(heapq.merge(*map(read_records, logs), key=_step), key=_step)
    logged = next(by_step, None)
    silent = range(0)
    for step in range(1, meta.step + 1):
        if logged is not None and logged[0] == step:
            _add_silent(result, silent)
            _compare(result, loader, step, list(logged[1]), is_skipped=step in skipped)
            logged, silent = next(by_step, None), range(0)
        else:
            silent = range(silent.start or step, step + 1)
        progress(step, meta.step)
    _add_silent(result, silent)
    return result


def _add_silent(result: Audit, steps: range) -> None:
    """Record consecutive steps without logs."""
    if steps:
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        _add(result, f"{which}: no samples were logged (run.log_samples was off, or the logs are missing)")
        result.num_faults += len(steps) - 1


def _add(result: Audit, fault: str) -> None:
    result.num_faults += 1
    if len(result.faults) < _SHOWN_FAULTS:
        result.faults.append(fault)


def _step(record: Record) -> int:
    step: int = record["step"]
    return step


def _compare(result: Audit, loader: Loader, step: int, records: list[Record], *, is_skipped: bool) -> None:
    expected = loader.samples_of(step - 1)
    ids: list[int] = []
    sums: dict[int, int] = {}
    for record in records:
        here, crcs = record.get("sample_ids", []), record.get("crc32")
        ids += here
        if crcs is not None and len(crcs) != len(here):
            _add(result, f"step {step}: a rank logged {len(crcs)} checksums of {len(here)} samples")
        elif crcs is not None:
            sums |= dict(zip(here, crcs, strict=True))
    counts = Counter(ids)
    tokens = loader.gather(expected)["input_ids"]
    ours = dict(zip(expected.tolist(), checksums(tokens), strict=True))
    changed = [sample for sample, crc in ours.items() if sums.get(sample, crc) != crc]
    found = {
        "missing": [sample for sample in ours if sample not in counts],
        "repeated": [sample for sample, count in counts.items() if count > 1],
        "of another step": [sample for sample in counts if sample not in ours],
        "changed": changed,
    }
    if any(found.values()):
        said = "; ".join(f"{what}: {samples[:5]}" for what, samples in found.items() if samples)
        _add(result, f"step {step}: {said}")
    good = set(ours) - set(found["missing"]) - set(changed)
    result.unchecked_samples += len(good - sums.keys())
    if is_skipped:
        result.skipped_samples += len(good)
    else:
        result.samples += len(good)
        result.tokens += len(good) * tokens.shape[1]
