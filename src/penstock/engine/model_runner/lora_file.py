"""LoRA adapter files of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds (alpha / r) B A x to the outputs W x of some linear layers (Hu et al., arXiv:2106.09685), or
alpha / sqrt(r) (rsLoRA, arXiv:2312.03732). Anything else that PEFT can store (other methods, biases, whole
layers, changed base weights) is refused by its key, unknown keys included, because an adapter applied in part
gives wrong answers silently. Nothing is unpickled, and a tensor that belongs to no layer of the model is an
error.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from penstock.checkpoint.hf import read_slice
from penstock.core.config import load_json
from penstock.core.errors import ConfigError, ModelError
from penstock.core.packages import Package
from penstock.models.llama.config import LlamaConfig
from penstock.models.llama.hugging_face import hugging_face_names
from penstock.models.llama.model import Llama
from penstock.models.llama.tensor_slices import ALONE, Slice, TensorParallelRank, slice_of, sliced_config
from penstock.nn.unfilled import unfilled

if TYPE_CHECKING:
    import safetensors
else:
    safetensors = Package("safetensors", "Adapters")


MAX_RANK = 512
"""Above this rank an adapter costs more than the layers it adapts."""

_CONFIG, _WEIGHTS, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"

_READ = frozenset({"r", "lora_alpha", "use_rslora", "peft_type"})
_OF_NO_EFFECT = frozenset({
    "alora_invocation_string", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "kasa_config",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "task_type", "velora_config",
})  # fmt: skip
"""Keys of PEFT without effect on inference: training settings, or what the tensor names say already."""
_EFFECT_FREE_STARTS = (None, True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged."""

_OUTER = ("embed_tokens", "lm_head")
"""Layers outside the blocks that PEFT can adapt or save whole."""

_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<which>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class Lora:
    """LoRA update of one linear layer: b @ a @ x."""

    a: Float[Tensor, "r inputs"]
    b: Float[Tensor, "outputs r"]
    """Already multiplied by alpha / r."""


def read_adapter(folder: Path, config: LlamaConfig, *, place: TensorParallelRank = ALONE) -> dict[str, Lora]:
    """Load an adapter; return its updates by the name of our linear layer.

    Args:
        config: of the unsharded model.
        place: tensor-parallel rank whose slices are loaded.

    Raises:
        ModelError: the folder is not a LoRA adapter of this model, or uses an unsupported feature.
    """
    settings = read_settings(folder)
    layers = {theirs.removesuffix(".weight"): ours for ours, theirs in hugging_face_names(config).items()}
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safetensors.safe_open(folder / _WEIGHTS, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                ours, which = _layer_of(name, layers, folder)
                part = _part(slice_of(ours, config, place), which)
                found.setdefault(ours.removesuffix(".weight"), {})[which] = read_slice(file, name, part)
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{folder / _WEIGHTS} cannot be read: {error}", fix="Save it again.") from None
    if not found:
        raise ModelError(f"{folder} adapts no layer", fix="Check the target_modules of its training.")
    shapes = _shapes(config, place)
    return {name: _lora(folder, name, pair, settings, shapes[name]) for name, pair in found.items()}


def read_settings(folder: Path) -> Mapping[str, Any]:  # Any: JSON
    """Read adapter_config.json; refuse what can be refused without the model.

    Raises:
        ModelError: the folder is not a LoRA adapter, or uses an unsupported feature.
    """
    path = folder / _CONFIG
    if not folder.is_dir():
        raise ModelError("No such adapter folder", got=str(folder), fix="Download it first.")
    if not path.is_file():
        below = min(folder.glob(f"*/{_CONFIG}"), default=None)  # PEFT's place for named adapters
        fix = f"Give {below.parent}." if below else "Give the folder of a LoRA adapter saved by PEFT."
        raise ModelError(f"{folder} has no {_CONFIG}", fix=fix)
    if not (folder / _WEIGHTS).is_file():
        pickled = " Pickled weights are not opened." if (folder / _PICKLED).exists() else ""
        raise ModelError(f"{folder} has no {_WEIGHTS}", fix=f"Save it with PEFT as safetensors.{pickled}")
    try:
        settings = load_json(path)
    except ConfigError as error:
        raise ModelError(str(error), fix="Save the adapter again.") from None
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{path}: adapters must be LoRA", got=settings.get("peft_type"), fix=_PLAIN)
    neutral = {"bias": "none", "init_lora_weights": settings.get("init_lora_weights")}
    for key in sorted(settings.keys() - _READ - _OF_NO_EFFECT):
        if settings[key] and settings[key] != neutral.get(key):
            raise ModelError(f"{path}: {key} is not supported", got=settings[key], fix=_PLAIN)
    if settings.get("init_lora_weights") not in _EFFECT_FREE_STARTS:
        raise ModelError(
            f"{path}: init_lora_weights changed the base weights",
            got=settings["init_lora_weights"],
            fix=_PLAIN,
        )
    _check_numbers(path, settings)
    return settings


def _check_numbers(path: Path, settings: Mapping[str, Any]) -> None:
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise ModelError(f"{path}: r must be a whole number from 1 to {MAX_RANK}", got=rank, fix=_PLAIN)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"{path}: lora_alpha must be a finite number", got=alpha, fix="Save it again.")


def _layer_of(name: str, layers: Mapping[str, str], folder: Path) -> tuple[str, str]:
    """Return the name of our weight that a stored tensor adapts, and "A" or "B"."""
    if outer := [layer for layer in _OUTER if f".{layer}." in name]:
        raise ModelError(
            f"{folder / _WEIGHTS} changes {outer[0]}, and adapters change the linear layers of blocks only",
            got=name,
            fix=f"If it was not trained, save with save_embedding_layers=False. {_PLAIN}",
        )
    match = _TENSOR.fullmatch(name)
    ours = layers.get(match["layer"], "") if match else ""
    if match is None or not ours.startswith("layers.") or "norm" in ours:
        raise ModelError(
            f"{folder / _WEIGHTS} has a tensor that adapts no linear layer of this model's blocks",
            got=name,
            fix=_CHECK,
        )
    return ours, match["which"]


def _part(part: Slice | None, which: str) -> Slice | None:
    """Return a rank's slice of A [r, inputs] or B [outputs, r], given its slice of [outputs, inputs]."""
    return part if part is not None and part[0] == (1 if which == "A" else 0) else None


def _shapes(config: LlamaConfig, place: TensorParallelRank) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every linear layer of a rank's blocks, by name."""
    with unfilled():
        model = Llama(sliced_config(config, place))
    return {
        name: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }


def _lora(
    folder: Path, name: str, pair: Mapping[str, Tensor], settings: Mapping[str, Any], shape: tuple[int, int]
) -> Lora:
    rank: int = settings["r"]
    expected = {"A": (rank, shape[1]), "B": (shape[0], rank)}
    shapes = {which: tuple(tensor.shape) for which, tensor in pair.items()}
    if shapes != expected:
        raise ModelError(
            f"{folder / _WEIGHTS}: the tensors of {name} have shapes {shapes}, this model needs {expected}",
            fix=_CHECK,
        )
    if not all(bool(tensor.isfinite().all()) for tensor in pair.values()):
        raise ModelError(
            f"{folder / _WEIGHTS}: the tensors of {name} have non-finite values", fix="Train it again."
        )
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return Lora(pair["A"], pair["B"] * scale)


_CHECK = "Check that the adapter was trained for this model."
_PLAIN = "Train it as plain LoRA, or merge it into the base model with PEFT and serve that."
