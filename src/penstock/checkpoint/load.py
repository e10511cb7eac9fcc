"""Read a checkpoint: into a training state on any number of ranks, or as a model on one."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_sharded

from penstock.checkpoint.layout import find, read_meta
from penstock.checkpoint.tensors import MODEL
from penstock.core.errors import CheckpointError
from penstock.data.manifest import TOKENIZER_FILE
from penstock.models import FAMILIES


def load_into(checkpoint: Path, tensors: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Fill tensors in place, resharding as needed; every rank must call it.

    Args:
        alone: whether this process reads by itself, outside a process group.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    reader = HuggingFaceStorageReader(str(checkpoint))
    try:
        with warnings.catch_warnings(), _quiet():
            # torch warns that there is no process group although `no_dist` says that none is meant
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_sharded(dict(tensors), storage_reader=reader, planner=_Whole(), no_dist=alone)
    except CheckpointException as error:
        reasons = {str(failure[0]) for failure in error.failures.values()}
        raise CheckpointError(
            f"Checkpoint {checkpoint} cannot be read: {'; '.join(sorted(reasons))}",
            fix="It is damaged: remove it to use the one before.",
        ) from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from printing the traceback of an error that it raises as well."""
    before = logging.root.manager.disable  # it logs to the root logger
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class _Whole(DefaultLoadPlanner):
    """Refuses a checkpoint that lacks part of a tensor; torch would leave that part as it was."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Compare what is wanted with what the files hold."""
        saved = metadata.state_dict_metadata if metadata else {}
        for name, tensor in state_dict.items():
            entry = saved.get(name)
            chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else []
            found = sum({tuple(chunk.offsets): chunk.sizes.numel() for chunk in chunks}.values())
            if found < tensor.numel():
                raise ValueError(f"its files hold {found} of {tensor.numel()} elements of {name}")
        super().set_up_planner(state_dict, metadata, is_coordinator)


def open_model(path: Path) -> tuple[nn.Module, Path | None]:
    """Open the model of a checkpoint, or of a run's newest one, whole, float32, on the CPU.

    Returns:
        The model in evaluation mode, and its tokenizer.json if the run has one.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint = find(path)
    meta = read_meta(checkpoint)
    with torch.device("meta"):
        model: nn.Module = FAMILIES[meta.model.model_type](meta.model)
    model = model.to_empty(device="cpu")
    load_into(checkpoint, {f"{MODEL}{name}": t for name, t in model.state_dict().items()}, alone=True)
    run = checkpoint.parent.parent
    tokenizer = run / TOKENIZER_FILE
    return model.eval(), tokenizer if tokenizer.is_file() else None
