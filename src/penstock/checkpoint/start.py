"""Starting weights of a run: a Hugging Face folder, or a checkpoint of another run; no torch."""

import hashlib
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.find import SavedCheckpoint, find
from penstock.checkpoint.hf_folder import identity_of, is_adapter, is_hugging_face, read_config
from penstock.checkpoint.layout import INDEX_FILE, MODEL
from penstock.checkpoint.weight_files import model_tensors
from penstock.core.errors import CheckpointError, ConfigError, ModelError
from penstock.models.decoder.config import DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWeights:
    """Weights from which a run starts."""

    folder: Path
    """Absolute path of the folder: of a model, a run or a checkpoint."""
    saved: SavedCheckpoint | None
    """The checkpoint; None: `folder` is a Hugging Face folder."""
    model: DecoderConfig
    identity: str
    """32 hex digits; see `hf_folder.identity_of`. Of a checkpoint: the hash of its index, which has the
    checksums of all data."""

    def __str__(self) -> str:
        """Return the path or address of the weights."""
        return str(self.folder if self.saved is None else self.saved)


def find_start(folder: Path, *, step: int | None = None, ignored_keys: Collection[str] = ()) -> StartWeights:
    """Return the weights in a folder: of a Hugging Face model, a run (its newest checkpoint) or a checkpoint.

    Args:
        step: step of a run's checkpoint, instead of the newest.
        ignored_keys: unknown keys of a Hugging Face folder's config.json to pass over, with a warning.

    Raises:
        ConfigError: there is no such folder.
        ModelError, CheckpointError: it has no weights that can be opened.
    """
    if not folder.is_dir():
        raise ConfigError(
            "run.start_from is no folder",
            got=str(folder),
            fix="Give a Hugging Face folder, a run, or a checkpoint of one.",
        )
    if is_adapter(folder):
        raise not_a_model(folder)
    folder = folder.absolute()
    if is_hugging_face(folder):
        model = read_config(folder, ignored_keys=ignored_keys)
        return StartWeights(folder=folder, saved=None, model=model, identity=identity_of(folder))
    saved = find(folder, step=step)
    model = saved.index().meta.model
    content = saved.place.read(saved.name, INDEX_FILE, 0, saved.place.size(saved.name, INDEX_FILE))
    identity = hashlib.blake2b(content, digest_size=16).hexdigest()
    return StartWeights(folder=folder, saved=saved, model=model, identity=identity)


def not_a_model(folder: Path) -> ModelError:
    """Return the error for the folder of an adapter in place of a model's."""
    return ModelError(
        f"{folder} is an adapter, and a model is needed",
        fix=f"Merge it into its base with `penstock export {shlex.quote(str(folder))} --merge --out FOLDER`, "
        "and give FOLDER.",
    )


def check_weights(start: StartWeights) -> None:
    """Refuse weights that are not those of their config. Only headers and the index are read.

    Raises:
        ModelError: tensors of the folder are missing, unexpected, of another shape, quantised or damaged.
        CheckpointError: the checkpoint is one of an adapter, which has no weights but the adapter's; or lacks
            tensors.
    """
    if start.saved is None:
        model_tensors(start.folder, start.model)
        return
    index = start.saved.index()
    if index.meta.adapter is not None:
        raise CheckpointError(
            f"{start.saved} has an adapter only, not the weights that it adapts",
            fix=f"Merge them: penstock export {shlex.quote(str(start.folder))} --merge --out FOLDER; then "
            "start from FOLDER.",
        )
    for name, shape in start.model.parameter_shapes.items():
        entry = index.tensors.get(f"{MODEL}{name}")
        if entry is None or entry.shape != shape:
            raise CheckpointError(
                f"{start.saved} does not match its model: {name} of shape {shape}",
                got="no such tensor" if entry is None else f"{entry.shape}",
                fix="Give another checkpoint of the run.",
            )


def text_folder(folder: Path) -> Path:
    """Return the folder of the tokenizer.json of a model, a run or a checkpoint: of the last, its run's."""
    return folder.parent.parent if (folder / INDEX_FILE).is_file() else folder
