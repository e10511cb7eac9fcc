"""Open a model for inference: a Hugging Face folder, or a Penstock run or checkpoint."""

from collections.abc import Collection
from pathlib import Path

from penstock.checkpoint.find import find
from penstock.checkpoint.hf import load_pretrained
from penstock.checkpoint.hf_folder import is_adapter, is_hugging_face, read_config
from penstock.checkpoint.start import find_start, not_a_model
from penstock.core.errors import ModelError, UsageError
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import ALONE, TensorParallelRank


def open_config(
    path: Path | str, *, step: int | None = None, ignored_keys: Collection[str] = ()
) -> DecoderConfig:
    """Return the config of the model in a folder; raises as `open_model` does."""
    path = Path(path)
    _check_folder(path)
    if is_hugging_face(path):
        if step is not None:
            raise UsageError(
                f"{path} has no checkpoints: it is a model", got=step, fix="Leave --checkpoint out."
            )
        return read_config(path, ignored_keys=ignored_keys)
    return find(path, step=step).index().meta.model


def identity_of_model(
    path: Path | str, *, step: int | None = None, ignored_keys: Collection[str] = ()
) -> str:
    """Return the identity of the weights in a folder, as run.start_hash has it; raises as `open_model`
    does."""
    return find_start(Path(path), step=step, ignored_keys=ignored_keys).identity


def open_model(
    path: Path | str,
    *,
    step: int | None = None,
    place: TensorParallelRank = ALONE,
    ignored_keys: Collection[str] = (),
    may_lack_head: bool = False,
) -> tuple[Decoder, Path | None]:
    """Return the model, in evaluation mode on the CPU, and the path of its tokenizer.json or None.

    Args:
        step: step of the run's checkpoint; None: the newest.
        place: tensor-parallel rank; the model is then that rank's shard.
        ignored_keys: unknown keys of a Hugging Face folder's config.json to pass over, with a warning.
        may_lack_head: as in `load_pretrained`.

    Raises:
        UsageError: the folder does not exist.
        ModelError, CheckpointError: the folder has no model that can be opened.
    """
    path = Path(path)
    _check_folder(path)
    if is_hugging_face(path):
        tokenizer = path / "tokenizer.json"
        model = load_pretrained(path, place=place, ignored_keys=ignored_keys, may_lack_head=may_lack_head)
        return model, tokenizer if tokenizer.is_file() else None
    # imported here: reading checkpoints loads torch.distributed, which a Hugging Face folder does not need
    from penstock.checkpoint.open_model import open_model as open_checkpoint

    opened, found = open_checkpoint(path, step=step, place=place)
    assert isinstance(opened, Decoder), type(opened)
    return opened, found


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        fix = "Give a run, a checkpoint or a Hugging Face folder."
        if len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists():
            fix += (
                f" Nothing is downloaded here: for a model of the hub, `hf download {path} --local-dir DIR`."
            )
        raise UsageError(f"{path} is not a folder", fix=fix)
    if is_adapter(path):
        raise not_a_model(path)
    if not (path / "config.json").is_file() and any(path.glob("model*.safetensors")):
        raise ModelError(f"{path} has weights and no config.json", fix="Download the whole folder again.")
