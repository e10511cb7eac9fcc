"""Prove from its logs that a run trained on exactly the samples of an uninterrupted one.

Every rank logged the ids and checksums of its samples. The order is a function, so one process can
compute what each step should have held and compare: nothing missing, nothing repeated, no token
changed, whatever kills and rescales lie between. Imports no torch.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from penstock.checkpoint.find import find
from penstock.core.errors import UsageError
from penstock.data import Loader
from penstock.obs.names import METRICS_FILE, SAMPLES_FOLDER
from penstock.obs.sinks import Record
from penstock.obs.sinks.jsonl import read_records
from penstock.train.checksums import checksums
from penstock.train.open_run import open_run

_SHOWN_FAULTS = 20


@dataclass(slots=True, kw_only=True)
class Audit:
    """What the logs of a run show."""

    steps: int
    """Steps of the newest checkpoint; what was logged after it is not part of the run."""
    samples: int = 0
    """Samples found in the logs, in place and unchanged."""
    tokens: int = 0
    """Tokens in them."""
    ranks: list[int] = field(default_factory=list)
    """Number of ranks after each start of the run."""
    faults: list[str] = field(default_factory=list)
    """What is missing, repeated or changed, one line a step, or one for steps in a row of which nothing was
    logged; the first ones."""
    num_faults: int = 0
    """Steps with a fault."""


def audit(run: Path, *, progress: Callable[[int, int], None]) -> Audit:
    """Compare the sample logs of a run with the order of an uninterrupted one.

    Args:
        progress: called with steps done and steps in all.

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
    starts = [record for record in read_records(run / METRICS_FILE) if record.get("event") == "start"]
    result = Audit(steps=meta.step, ranks=[record["ranks"] for record in starts])
    by_step = groupby(heapq.merge(*map(_records, logs), key=_step), key=_step)
    logged = next(by_step, None)
    silent = range(0)
    for step in range(1, meta.step + 1):
        if logged is not None and logged[0] == step:
            _add_silent(result, silent)
            _compare(result, loader, step, list(logged[1]))
            logged, silent = next(by_step, None), range(0)
        else:
            silent = range(silent.start or step, step + 1)
        progress(step, meta.step)
    _add_silent(result, silent)
    return result


def _add_silent(result: Audit, steps: range) -> None:
    """Count steps in a row of which nothing was logged."""
    if steps:
        which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        _add(result, f"{which}: no samples were logged (run.log_samples was off, or the logs are gone)")
        result.num_faults += len(steps) - 1


def _add(result: Audit, fault: str) -> None:
    result.num_faults += 1
    if len(result.faults) < _SHOWN_FAULTS:
        result.faults.append(fault)


def _step(record: Record) -> int:
    step: int = record["step"]
    return step


def _records(path: Path) -> Iterator[Record]:
    return iter(read_records(path))


def _compare(result: Audit, loader: Loader, step: int, records: list[Record]) -> None:
    expected = loader.samples_of(step - 1)
    ids = [sample for record in records for sample in record["sample_ids"]]
    sums = dict(zip(ids, (crc for record in records for crc in record["crc32"]), strict=True))
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
    good = len(ours) - len(set(found["missing"]) | set(changed))
    result.samples += good
    result.tokens += good * tokens.shape[1]
