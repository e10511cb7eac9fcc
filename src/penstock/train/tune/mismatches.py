"""KTO's partners of a corpus and their reference log-probabilities; computed once, as references are."""

import io
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from penstock.core.files import take_lock, write_atomic
from penstock.data.corpus.corpus import Corpus
from penstock.parallel.collectives import CollectiveGroup
from penstock.train.tune.corpus_pass import Pass
from penstock.train.tune.kto import Examples, Mismatches, mismatched_log_probs
from penstock.train.tune.preference import num_slices
from penstock.train.tune.reference import mismatched_file

log = logging.getLogger(__name__)

_AT_ONCE = 1024
"""Examples whose sequences a rank holds at once."""


def mismatches_of(
    corpora: Mapping[str, Corpus],
    model: Mapping[str, object],
    of: Pass,
    *,
    length: int,
    slices: CollectiveGroup | None,
) -> dict[str, Mismatches]:
    """Return the mismatched examples of each corpus; every rank must call it, as `reference_columns`."""
    found = {}
    for name, corpus in corpora.items():
        file, examples = mismatched_file(corpus, model, length=length), Examples(corpus)
        if of.world.most(not file.is_file()):
            if of.world.is_first:
                told = f"Computing the reference of mismatched answers of corpus {name!r} once."
                log.info("mismatched corpus=%s examples=%d", name, len(examples), extra={"told": told})
            table = _computed(examples, of, length=length, slices=slices)
            if of.world.ranks.local_rank == 0:
                _write(file, table)
            dist.barrier()
        partners, reference = np.load(file, allow_pickle=False)
        found[name] = Mismatches(examples, partners.astype(np.int64), reference)
    return found


def _computed(
    examples: Examples, of: Pass, *, length: int, slices: CollectiveGroup | None
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    partners = examples.partners()
    reference = torch.zeros(len(examples), dtype=torch.float64, device=of.world.device)
    for first in range(0, len(examples), _AT_ONCE * of.parts):
        mine = range(first + of.part, min(first + _AT_ONCE * of.parts, len(examples)), of.parts)
        sequences = [examples.mismatched(n, int(partners[n]), length=length) for n in mine]
        found = mismatched_log_probs(of, sequences, length=length, slices=slices)
        if of.gives:
            reference[list(mine)] = found / num_slices(slices)
        of.check_stop()
    dist.all_reduce(reference)
    return np.stack((partners.astype(np.float64), reference.cpu().numpy()))


def _write(file: Path, table: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> None:
    content = io.BytesIO()
    np.save(content, table, allow_pickle=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    path = file.with_name(f"{file.name}.lock")
    lock = take_lock(path, waits=True)  # another job, or a machine that shares the folder, writes it too
    assert lock is not None
    try:
        if not file.is_file():
            write_atomic(file, content.getvalue())
    finally:
        path.unlink()
        lock.close()
