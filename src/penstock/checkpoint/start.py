"""Starting weights of a run: a Hugging Face folder, or a checkpoint of another run; no torch."""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.find import SavedCheckpoint, find
from penstock.checkpoint.hf_folder import identity_of, is_adapter, is_hugging_face, read_config
from penstock.checkpoint.layout import INDEX_FILE
from penstock.core.errors import CheckpointError, ConfigError, ModelError
from penstock.models.llama.config import LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWeights:
    """Weights from which a run starts."""

    folder: Path
    """Absolute path of the folder: of a model, a run or a checkpoint."""
    saved: SavedCheckpoint | None
    """The checkpoint; None: `folder` is a Hugging Face folder."""
    model: LlamaConfig
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
        fix=f"Merge it into its base with `penstock export {folder} --merge --out FOLDER`, and give FOLDER.",
    )


def refuse_adapter(start: StartWeights) -> None:
    """Refuse the checkpoint of a run that tunes an adapter: it has the adapter only, and no weights.

    Raises:
        CheckpointError: with the command that makes weights of it.
    """
    if start.saved is not None and start.saved.index().meta.adapter is not None:
        raise CheckpointError(
            f"{start.saved} has an adapter only, not the weights that it adapts",
            fix=f"Merge them: penstock export {start.folder} --merge --out FOLDER; then start from FOLDER.",
        )


def text_folder(folder: Path) -> Path:
    """Return the folder of the tokenizer.json of a model, a run or a checkpoint: of the last, its run's."""
    return folder.parent.parent if (folder / INDEX_FILE).is_file() else folder
