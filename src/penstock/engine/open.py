"""Open what can be generated from: a Hugging Face folder, or a Penstock run or checkpoint."""

from pathlib import Path

from penstock.checkpoint.hf import is_hugging_face, load_pretrained
from penstock.core.errors import UsageError
from penstock.models.llama.model import Llama


def open_model(path: Path, *, step: int | None = None) -> tuple[Llama, Path | None]:
    """Return the model, in evaluation mode on the CPU, and its tokenizer.json if it has one.

    Args:
        step: of a run's checkpoint, instead of its newest.

    Raises:
        UsageError: there is no such folder.
        ModelError, CheckpointError: it holds no model that can be opened.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder", fix="Give a run, a checkpoint or a Hugging Face folder.")
    if is_hugging_face(path):
        tokenizer = path / "tokenizer.json"
        return load_pretrained(path), tokenizer if tokenizer.is_file() else None
    # here, because reading checkpoints loads torch.distributed, which a Hugging Face folder does not need
    from penstock.checkpoint.load import open_model as open_checkpoint

    model, found = open_checkpoint(path, step=step)
    assert isinstance(model, Llama), type(model)
    return model, found
