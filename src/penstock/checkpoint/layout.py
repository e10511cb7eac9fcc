"""Checkpoint layout: folder names and the index (step, model, loader, tensors, files); no torch.

    PLACE/step-00001200/rank-00000.safetensors   the file of a rank: see shard_file.py
    PLACE/step-00001200/checkpoint.json          the index: written last, with its own checksum

PLACE is RUN/checkpoints, or checkpoint.dir of the recipe. A checkpoint with an index is complete. Nothing in
it is a pickle: opening a checkpoint cannot run code.
"""

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.core import config
from penstock.core.errors import CheckpointDamaged, CheckpointError, PenstockError
from penstock.models.decoder.config import DecoderConfig
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.obs.metric_names import CHECKPOINTS_FOLDER, checkpoint_name

FOLDER = CHECKPOINTS_FOLDER
name_of = checkpoint_name
INDEX_FILE = "checkpoint.json"
MODEL, OPTIMIZER = "model.", "optimizer."
"""Prefixes of the names of tensors."""
VERSION = 2
NUMERICS = 2
"""Version of the order in which a training step computes. 2: one rank without FSDP2, losses in large chunks,
SDPA for rows of one document (docs/adr/0069-one-rank-without-fsdp2.md)."""
_NAME = re.compile(r"step-(\d{8,})")
_CHECKSUM = "crc32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """Metadata of a checkpoint: step, model, loader state."""

    version: int = VERSION
    """Version of the layout."""
    step: int
    """Number of optimizer steps taken."""
    tokens: int
    """Tokens trained on."""
    model: DecoderConfig
    """Config of the network."""
    loader: dict[str, Any]
    """State of the loader: JSON values."""
    adaptive: dict[str, Any] = field(default_factory=dict)
    """Memory of the mixing policy: JSON values; empty without one."""
    outer: dict[str, Any] = field(default_factory=dict)
    """State of islands (models that train separately) besides their tensors: JSON values."""
    early_stop: dict[str, Any] = field(default_factory=dict)
    """Best held-out loss, its step and the validations since: JSON values; empty without early stop."""
    seed: int
    """Seed of the run; it keys every random choice, so no generator state is saved."""
    world_size: int
    """Number of ranks that wrote it; any number can read it."""
    start_from: str = ""
    """Path of the weights that the run started from; empty: it started from random ones."""
    start_step: int | None = None
    """Step of the run that it names; None: it is a model or a checkpoint."""
    start_hash: str = ""
    """Identity of those weights."""
    adapter: AdapterConfig | None = None
    """The adapter that the run trains on top of those weights, which are not in its checkpoints; None: all
    weights are trained."""
    numerics: int = 1
    """`NUMERICS` of the code that trained it; the first versions did not say."""
    kernels: dict[str, Any] = field(default_factory=dict)
    """Table of the kernels that trained it (devices/kernel_table.py): JSON values; the first versions did not
    say."""
    saved_at: str = ""
    """Time of the save: ISO 8601, UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Stored dtype and shape of a tensor."""

    dtype: str
    """Name of the dtype in safetensors."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """Size and header checksum of a rank's file."""

    num_bytes: int
    header_bytes: int
    """Bytes of the header, up to the data."""
    header_crc32: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointIndex:
    """Index of a checkpoint: everything but tensor data."""

    meta: Meta
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, without the index."""
        return sum(file.num_bytes for file in self.files.values())


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name; None if it is not a checkpoint's.

    >>> step_of("step-00001200"), step_of(".step-00001200.tmp")
    (1200, None)
    """
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def in_order(names: Sequence[str]) -> list[str]:
    """Return the names of checkpoints among some names, oldest first; steps may exceed 8 digits."""
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    return sorted(steps, key=steps.__getitem__)


def encode(index: CheckpointIndex) -> bytes:
    """Return the content of an index file."""
    raw = config.dump(index.meta)
    raw["tensors"] = {name: [entry.dtype, list(entry.shape)] for name, entry in index.tensors.items()}
    raw["files"] = {name: config.dump(entry) for name, entry in index.files.items()}
    raw[_CHECKSUM] = _checksum(raw)
    return (json.dumps(raw, indent=1, ensure_ascii=False) + "\n").encode()


def decode(content: bytes, *, path: str) -> CheckpointIndex:
    """Parse the content of an index file.

    Args:
        path: path of the file, for messages.

    Raises:
        CheckpointDamaged: it is damaged.
        CheckpointError: another version of Penstock wrote it.
    """
    try:
        raw = json.loads(content)
        if not isinstance(raw, dict) or "version" not in raw:
            raise ValueError("it is not a checkpoint index")
        _check_version(raw["version"], path)
        if raw.pop(_CHECKSUM, None) != _checksum(raw):
            raise ValueError("its checksum is wrong")
        tensors = {name: TensorEntry(dtype=d, shape=tuple(s)) for name, (d, s) in raw.pop("tensors").items()}
        files = {name: config.build(FileEntry, entry) for name, entry in raw.pop("files").items()}
        return CheckpointIndex(meta=config.build(Meta, raw), tensors=tensors, files=files)
    except CheckpointError:
        raise
    except (PenstockError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: str, why: str) -> CheckpointDamaged:
    """Return the error for a damaged checkpoint."""
    return CheckpointDamaged(
        f"{path} is damaged: {why}",
        fix="Restore it, or remove that checkpoint to use the one before, or none if it is the first.",
    )


def check_model(meta: Meta, model: DecoderConfig, *, checkpoint: str) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        CheckpointError: the message lists every size that differs.
    """
    saved, ours = config.dump(meta.model), config.dump(model)
    changes = [f"{name} was {saved[name]}, is {ours[name]}" for name in saved if saved[name] != ours[name]]
    if changes:
        raise CheckpointError(
            f"Checkpoint {checkpoint} is of another model: {'; '.join(changes)}",
            fix="Resume with the recipe it was saved with, or choose another run.dir.",
        )


def check_adapter(meta: Meta, adapter: AdapterConfig | None, *, checkpoint: str) -> None:
    """Refuse a checkpoint of another adapter, or of a model where an adapter is expected.

    Raises:
        CheckpointError: the message lists what differs.
    """
    saved, ours = (_flat(one) for one in (meta.adapter, adapter))
    changes = [f"{name} was {saved.get(name)}, is {ours.get(name)}" for name in saved | ours]
    changes = [
        said for said, name in zip(changes, saved | ours, strict=True) if saved.get(name) != ours.get(name)
    ]
    if changes:
        raise CheckpointError(
            f"Checkpoint {checkpoint} is of another [tune]: {'; '.join(changes)}",
            fix="Resume with the recipe it was saved with, or choose another run.dir.",
        )


def _flat(adapter: AdapterConfig | None) -> dict[str, Any]:
    return {"method": "full"} if adapter is None else config.dump(adapter)


def _check_version(version: object, path: str) -> None:
    if version != VERSION:
        raise CheckpointError(
            f"{path} has layout {version}, and this Penstock reads layout {VERSION}",
            fix="Open it with the Penstock that wrote it: `penstock export` there makes a Hugging Face "
            "folder. To start again, choose another run.dir.",
        )


def _checksum(raw: dict[str, Any]) -> int:
    """Return the CRC-32 of JSON values, independent of their formatting."""
    return zlib.crc32(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode())
