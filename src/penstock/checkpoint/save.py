"""Write a checkpoint: every rank its shards, once, then one rename that makes it exist."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from penstock.checkpoint.layout import META_FILE, Meta, complete, folder_of
from penstock.core import config
from penstock.core.errors import CheckpointError
from penstock.core.files import commit, remove_tree, temporary_beside, write_json
from penstock.core.units import mib

log = logging.getLogger(__name__)


def save(run: Path, tensors: Mapping[str, Tensor], meta: Meta, *, keep: int) -> Path:
    """Save a checkpoint; every rank must call it. Returns its folder.

    Replicated tensors are written by one rank, sharded ones by each rank that holds a shard. A kill or
    a full disk at any moment leaves the checkpoints that were complete before.

    Args:
        keep: newest checkpoints to keep, this one counted.

    Raises:
        CheckpointError: it could not be written; the message has the reason.
    """
    final = folder_of(run, meta.step)
    temporary = temporary_beside(final)
    is_first = dist.get_rank() == 0
    error = _said_by_first(_make_room(temporary) if is_first else None)
    if error is None:
        error = _write(tensors, temporary)
        error = _said_by_first(_finish(temporary, final, meta) if is_first and error is None else error)
    if error is not None:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        kept = complete(run)
        raise CheckpointError(
            f"Checkpoint {final} could not be written: {error}",
            fix=f"Free space or choose another disk, then run the same command: "
            f"it resumes from {kept[-1].name if kept else 'the start'}.",
        )
    if is_first:
        for old in complete(run)[:-keep]:
            remove_tree(old)
        size = sum(path.stat().st_size for path in final.iterdir())
        log.info("checkpoint step=%d size=%s path=%s", meta.step, mib(size).replace(" ", ""), final)
    return final


def _said_by_first(error: str | None) -> str | None:
    """Return what rank 0 says went wrong, on every rank."""
    outcome = [error]
    dist.broadcast_object_list(outcome)
    return outcome[0]


def _make_room(temporary: Path) -> str | None:
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        for leftover in temporary.parent.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        return str(error)
    return None


def _write(tensors: Mapping[str, Tensor], folder: Path) -> str | None:
    """Write this rank's tensors; return what went wrong on any rank."""
    try:
        save_sharded(
            dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True)
        )
    except CheckpointException as error:
        reasons = {str(failure[0]) for failure in error.failures.values()}
        return "; ".join(sorted(reasons))
    return None


def _finish(temporary: Path, final: Path, meta: Meta) -> str | None:
    try:
        write_json(temporary / META_FILE, config.dump(meta))
        remove_tree(final)
        commit(temporary, final)
    except OSError as error:
        return str(error)
    return None
