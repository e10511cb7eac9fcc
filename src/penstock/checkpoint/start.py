"""Starting weights of a run: a Hugging Face folder, or a checkpoint of another run; no torch."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from penstock.checkpoint.find import SavedCheckpoint, find
from penstock.checkpoint.hf_folder import identity_of, is_hugging_face, read_config
from penstock.checkpoint.layout import INDEX_FILE
from penstock.core.errors import ConfigError
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


def find_start(folder: Path, *, step: int | None = None) -> StartWeights:
    """Return the weights in a folder: of a Hugging Face model, a run (its newest checkpoint) or a checkpoint.

    Args:
        step: step of a run's checkpoint, instead of the newest.

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
    folder = folder.absolute()
    if is_hugging_face(folder):
        return StartWeights(
            folder=folder, saved=None, model=read_config(folder), identity=identity_of(folder)
        )
    saved = find(folder, step=step)
    model = saved.index().meta.model
    content = saved.place.read(saved.name, INDEX_FILE, 0, saved.place.size(saved.name, INDEX_FILE))
    identity = hashlib.blake2b(content, digest_size=16).hexdigest()
    return StartWeights(folder=folder, saved=saved, model=model, identity=identity)


def text_folder(folder: Path) -> Path:
    """Return the folder of the tokenizer.json of a model, a run or a checkpoint: of the last, its run's."""
    return folder.parent.parent if (folder / INDEX_FILE).is_file() else folder
