"""Reference log-probabilities: computed once by the starting model, kept as a column beside the corpus.

A preference loss compares with the model that the run started from. That model takes no memory here: before
the first step the model being trained *is* it (an adapter adds zero then), so the ranks of the run compute
its log-probabilities with one pass over the corpus. They are kept in the cache folder, by the fingerprint of
the corpus and everything else that they depend on; later starts read them.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch.distributed as dist
from torch import Tensor

from penstock.core import config
from penstock.core.env import cache_folder
from penstock.core.log import EventLog
from penstock.data.corpus.columns import INDEX_FILE, REJECTED
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import ColumnEntry
from penstock.data.corpus_rows import CorpusRows
from penstock.nn.head import OutputHead
from penstock.nn.token_log_probs import token_log_probs
from penstock.parallel.mesh import World
from penstock.train.tune.corpus_pass import (
    BLOCK_TOKENS,
    Partial,
    Pass,
    blocks_from,
    progress_said,
    score_block,
)

log = EventLog(__name__)

REFERENCE = "reference"
"""Column: log-probability of each learned token under the reference model, in nats."""
ENTRY = ColumnEntry(name=REFERENCE, dtype="float32")


def reference_folder(corpus: Corpus, model: Mapping[str, object], *, length: int) -> Path:
    """Return the folder of a corpus's reference column.

    Args:
        model: what the log-probabilities depend on, as JSON values.
        length: tokens per row; longer documents are left out.
    """
    key = config.fingerprint([corpus.manifest.fingerprint, dict(model), length])
    return cache_folder() / REFERENCE / key


def reference_columns(
    corpora: Mapping[str, Corpus], model: Mapping[str, object], of: Pass, *, length: int
) -> dict[str, Path]:
    """Return the folder of each corpus's reference column, computed if it is not there.

    Every rank must call it, with the starting weights in the model unless `all_there`.
    """
    folders = {name: reference_folder(corpus, model, length=length) for name, corpus in corpora.items()}
    for name, corpus in corpora.items():
        if not _is_there(folders[name], of.world):
            _compute(name, corpus, folders[name], model, of, length=length)
    return folders


def mismatched_file(corpus: Corpus, model: Mapping[str, object], *, length: int) -> Path:
    """Return the file of KTO's partners of a corpus and their reference; arguments as `reference_folder`."""
    folder = reference_folder(corpus, model, length=length)
    return folder.with_name(f"{folder.name}-mismatched.npy")


def all_there(
    corpora: Mapping[str, Corpus],
    model: Mapping[str, object],
    world: World,
    *,
    length: int,
    mismatched: bool,
) -> bool:
    """Return True if every rank has the references of all corpora; every rank must call it.

    Args:
        mismatched: those of KTO's mismatched answers too.
    """
    lacking = 0
    for corpus in corpora.values():
        lacking += not (reference_folder(corpus, model, length=length) / INDEX_FILE).is_file()
        lacking += mismatched and not mismatched_file(corpus, model, length=length).is_file()
    return not world.most(lacking)


def reference_scores(hidden: Tensor, head: OutputHead, labels: Tensor) -> tuple[Tensor]:
    """Return the log-probability of each label."""
    return (token_log_probs(hidden, head, labels),)


def _is_there(folder: Path, world: World) -> bool:
    return not world.most(not (folder / INDEX_FILE).is_file())


def _compute(
    name: str, corpus: Corpus, folder: Path, model: Mapping[str, object], of: Pass, *, length: int
) -> None:
    world = of.world
    columns = [column for column in (REJECTED,) if column in corpus.columns]
    rows = CorpusRows(corpus, length=length, cuts=False, block_tokens=BLOCK_TOKENS, columns=columns)
    keeps = world.ranks.local_rank == 0
    made_with = {"model": dict(model), "row_length": length}
    partial = Partial(folder, corpus, [ENTRY], made_with, keeps=keeps and not folder.exists())
    first = -round(world.most(-partial.blocks if keeps else -rows.num_blocks))
    if world.is_first:
        log.info(
            "reference",
            "Computing the reference log-probabilities of corpus {corpus!r} once: {tokens:,} "
            "tokens by the starting model. They are kept in {path}",
            corpus=name,
            tokens=rows.num_tokens,
            path=folder,
        )
    on_block = progress_said(f"Reference of {name!r}", rows.num_blocks, says=world.is_first)
    was_training = of.model.training
    of.model.eval()
    for block, tables in blocks_from(rows, first):
        values = score_block(of, rows, tables, reference_scores, [ENTRY])
        partial.put(rows, tables, values, blocks=block + 1)
        on_block(block + 1)
        of.check_stop()
    of.model.train(was_training)
    kept = world.sum(*(keeps and rank == world.ranks.rank for rank in range(world.ranks.world_size)))
    for rank in np.flatnonzero(kept).tolist():  # one a machine; they may share the folder
        if rank == world.ranks.rank and not folder.exists():
            partial.publish()
        dist.barrier()
    if keeps:
        partial.remove()
