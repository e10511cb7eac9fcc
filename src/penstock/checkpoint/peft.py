"""LoRA adapter files of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds (alpha / r) B A x to the outputs W x of some linear layers (Hu et al., arXiv:2106.09685), or
alpha / sqrt(r) (rsLoRA, arXiv:2312.03732); DoRA also scales the outputs (arXiv:2402.09353). Modules that are
trained whole (modules_to_save) are merged, and refused where each request has its own adapter. Anything else
that PEFT can store (other methods, biases, changed base weights) is refused by its key, unknown keys
included, because an adapter applied in part gives wrong answers silently. Nothing is unpickled, and a tensor
that belongs to no layer of the model is an error. Where the output matrix is adapted, PEFT stores a copy of
the frozen one too, which is passed over.

Rows of tokens that the base lacks (nn/new_rows.py) are PEFT's `trainable_token_indices`: whole rows, by token
id. The model must have those rows before PEFT reads the folder: `model.resize_token_embeddings(n)`. The only
rows that are read are those after the base's last.

Folders that Penstock writes name their base by path, as PEFT's do, and by its identity (hf_folder.py), in the
metadata of the weights, where PEFT passes over it. An adapter for another base is refused.
"""

import json
import math
import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from penstock.checkpoint.hf import appearing, check_new, read_slice, write_texts
from penstock.checkpoint.hf_folder import ADAPTER_CONFIG
from penstock.checkpoint.layout import FOLDER as CHECKPOINTS
from penstock.checkpoint.layout import INDEX_FILE
from penstock.core.config import load_json
from penstock.core.errors import ConfigError, ModelError
from penstock.core.packages import Package
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import ALONE, Slice, TensorParallelRank, slice_of, sliced_config
from penstock.models.family.tensors import StoredRows
from penstock.nn.linear.adapter_config import (
    LINEAR_LAYERS,
    MAX_RANK,
    OUTPUT_MATRIX,
    AdapterConfig,
    BaseWeights,
)
from penstock.nn.linear.lora import Adapter
from penstock.nn.new_rows import NEW_ROWS, is_new_rows
from penstock.nn.unfilled import unfilled

if TYPE_CHECKING:
    import safetensors
    import safetensors.torch as safetensors_torch
else:
    safetensors = Package("safetensors", "Adapters")
    safetensors_torch = Package("safetensors.torch", "Adapters")

_CONFIG, _WEIGHTS, _PICKLED = ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin"

_READ = frozenset(
    {
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "peft_type",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
    }
)
_OF_NO_EFFECT = frozenset({
    "alora_invocation_string", "auto_mapping", "base_model_name_or_path", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "inference_mode", "kasa_config",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "task_type", "trainable_token_indices", "velora_config",
})  # fmt: skip
"""Keys of PEFT without effect on inference: training settings, or what the tensor names say already."""
_EFFECT_FREE_STARTS = (None, True, False, "gaussian", "orthogonal")
"""Values of init_lora_weights that leave the base weights unchanged."""

_EMBEDDING, _TIED = "model.embed_tokens.weight", "lm_head.weight"

_FROZEN_OUTPUT = "base_model.model.lm_head.base_layer.weight"
"""Name of PEFT's copy of an adapted output matrix."""

_TENSOR = re.compile(
    r"base_model\.model\.(?P<layer>.+)\.lora_(?P<which>A\.weight|B\.weight|magnitude_vector(\.weight)?)"
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TOKENS = re.compile(r"base_model\.model\.(?P<layer>.+)\.token_adapter\.trainable_tokens_delta")
_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_TOKEN_ROWS = "token_adapter.trainable_tokens_delta"
_MAX_PATTERNS, _LONGEST_PATTERN, _MAX_REPEATS = 2000, 300, 4
_BASE_HASH = "penstock.base_hash"
_BASE_WEIGHTS = "penstock.base_weights"


def read_adapter(
    folder: Path, config: DecoderConfig, *, place: TensorParallelRank = ALONE, base_hash: str = ""
) -> dict[str, Adapter]:
    """Load the adapted layers of a folder, by the name of our linear layer; `read_new_rows` has the rest.

    Args:
        config: of the unsharded model.
        place: tensor-parallel rank whose slices are loaded.
        base_hash: identity of the model; "": unknown.

    Raises:
        ModelError: the folder is not a LoRA adapter of this model, or uses an unsupported feature.
    """
    settings = read_settings(folder)
    found = _read_tensors(folder, config, place=place, base_hash=base_hash)
    shapes, of_layers = _shapes(config, place), _patterns(settings)
    adapters = {}
    for name, parts in found.items():
        own = of_layers.of_stored(config.stored_rows[f"{name}.weight"].tensor.removesuffix(".weight"))
        _check_parts(folder, name, parts, own, shapes[name])
        adapters[name] = Adapter(parts["A"], parts["B"], _scale(own, settings), parts.get("magnitude"))
    return adapters


def read_new_rows(folder: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the rows of an adapter for tokens that its base lacks, by name: `embed.new_rows`.

    Args:
        config: of the base.

    Returns:
        [new tokens, hidden] for the embedding, and for the output matrix unless it is tied; empty without
        new tokens.

    Raises:
        ModelError: it has other rows of the embedding or the output matrix.
    """
    settings = read_settings(folder)
    ours = {rows.tensor.removesuffix(".weight"): name for name, rows in config.stored_rows.items()}
    wanted = {
        layer: name
        for layer, name in ours.items()
        if settings.get("trainable_token_indices") and name in ("embed.weight", "unembed.weight")
    }
    found = {}
    with safetensors.safe_open(folder / _WEIGHTS, framework="pt") as file:
        for stored in file.keys():  # noqa: SIM118 - not a mapping
            if match := _TOKENS.fullmatch(stored):
                found[match["layer"]] = file.get_tensor(stored)
    if found.keys() != wanted.keys():
        raise ModelError(
            f"{folder / _WEIGHTS} has rows of tokens for {', '.join(sorted(found)) or 'no matrix'}, and this "
            f"model needs them for {', '.join(sorted(wanted)) or 'none'}",
            fix=_MERGE_THERE,
        )
    for layer, rows in found.items():
        indices = _token_indices(settings, layer)
        following = [*range(config.vocab_size, config.vocab_size + len(indices))]
        fits = tuple(rows.shape) == (len(indices), config.hidden_size) and rows.dtype in _DTYPES
        if indices != following or not fits or not rows.isfinite().all():
            raise ModelError(
                f"{folder}: the trained rows of {layer} are not those that follow the {config.vocab_size} of "
                "the base",
                got=f"{len(indices)} token ids, {rows.dtype} rows of shape {tuple(rows.shape)}",
                fix=_MERGE_THERE,
            )
    return {ours[layer].replace("weight", NEW_ROWS): rows for layer, rows in found.items()}


def read_saved_modules(folder: Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Return the parameters that an adapter has whole, by our names; empty without any.

    Args:
        config: of the base. Matrices with a row per token may have more rows.

    Raises:
        ModelError: they are not those of this model, or have other shapes or non-finite values.
    """
    settings = read_settings(folder)
    names = saved_modules(settings)
    theirs = {stored.tensor: ours for ours, stored in config.stored_rows.items() if stored.is_whole}
    found = {}
    with safetensors.safe_open(folder / _WEIGHTS, framework="pt") as file:
        for stored in file.keys():  # noqa: SIM118 - not a mapping
            if (name := _saved_name(stored, names)) is not None:
                found[name] = file.get_tensor(stored)
    if config.tie_word_embeddings and _EMBEDDING in found:
        copied = found.pop(_TIED, found[_EMBEDDING])
        if not settings.get("ensure_weight_tying") or not torch.equal(copied, found[_EMBEDDING]):
            raise ModelError(
                f"{folder} trains the embedding alone, and the output matrix of this model is the embedding",
                got=", ".join(names),
                fix="Train it with ensure_weight_tying=True.",
            )
    shapes = config.parameter_shapes
    for name, tensor in found.items():
        wanted = shapes.get(theirs.get(name, ""), ())
        is_vocabulary = theirs.get(name) in ("embed.weight", "unembed.weight")
        fits = (
            tensor.shape[1:] == wanted[1:]
            and (len(tensor) >= wanted[0] if is_vocabulary else tensor.shape == wanted)
            if wanted and tensor.ndim == len(wanted)
            else False
        )
        if not fits or tensor.dtype not in _DTYPES or not tensor.isfinite().all():
            raise ModelError(
                f"{folder / _WEIGHTS}: {name} is no parameter of this model, or has non-finite values",
                got=f"{tensor.dtype} of shape {tuple(tensor.shape)}",
                fix=_CHECK,
            )
    whole = {name for name in theirs if any(_is_in(name, module) for module in names)}
    if found.keys() != whole:
        raise ModelError(
            f"{folder / _WEIGHTS} lacks parameters that modules_to_save names, or the model does",
            got=", ".join(sorted(found.keys() ^ whole)[:4]),
            fix=_CHECK,
        )
    return {theirs[name]: tensor for name, tensor in found.items()}


def saved_modules(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return PEFT's names of the modules that an adapter has whole: the last parts."""
    return tuple(settings.get("modules_to_save") or ())


def _saved_name(stored: str, modules: Collection[str]) -> str | None:
    """Return the model's name of a stored parameter if a module is trained whole that has it."""
    name = stored.removeprefix("base_model.model.")
    if name == _TIED and any(_is_in(_EMBEDDING, module) for module in modules):
        return name  # PEFT stores a tied output matrix too
    is_saved = any(_is_in(name, module) for module in modules)
    is_kind = name.endswith((".weight", ".bias", ".sinks"))
    is_plain = not any(part in name for part in (".lora_", ".base_layer.", ".token_adapter."))
    return name if is_saved and is_kind and is_plain else None


def _is_in(name: str, module: str) -> bool:
    """Return True if a parameter is inside a module, of whose name the end is given, as PEFT compares."""
    parts = name.split(".")
    return any(".".join(parts[:n]).endswith(module) for n in range(1, len(parts)))


def _token_indices(settings: Mapping[str, Any], layer: str) -> list[int]:
    """Return the token ids whose rows of a layer an adapter has."""
    given = settings["trainable_token_indices"]
    if isinstance(given, dict):  # otherwise they are those of the embedding
        given = next((ids for name, ids in given.items() if layer.endswith(name)), None)
    return list(given) if isinstance(given, list) else []


def base_weights_of(folder: Path) -> str:
    """Return the rounding of the base that an adapter was trained on, as in AdapterConfig."""
    with safetensors.safe_open(folder / _WEIGHTS, framework="pt") as file:
        kind: str = (file.metadata() or {}).get(_BASE_WEIGHTS, "compute")
    return kind if kind in get_args(BaseWeights) else "compute"


def save_adapter(
    tensors: Mapping[str, Tensor],
    adapter: AdapterConfig,
    model: DecoderConfig,
    folder: Path,
    *,
    base: str,
    base_hash: str,
    extra_files: Mapping[str, str] | None = None,
) -> None:
    """Write an adapter as PEFT does.

    Args:
        tensors: parameters by our names, whole: `layers.0.attention.query.lora_a`.
        model: config of the model that it adapts.
        folder: must not exist, or be empty.
        base: path of that model.
        base_hash: its identity, as run.start_hash has it.
        extra_files: text files to add, by name.

    Raises:
        UsageError: the folder is not empty.
        ModelError: the folder could not be written (a full disk).
    """
    check_new(folder)
    layout = model.stored_rows
    content: dict[str, Tensor] = {}
    saved: dict[str, None] = {}
    modules: dict[str, _Parts] = {}
    token_indices: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        if name in layout:  # trained whole
            theirs = layout[name].tensor
            if not layout[name].is_whole:
                raise ModelError(
                    f"{name} was trained whole, and this family stores it as some rows of {theirs}: PEFT "
                    "has no form for that",
                    fix="Export the merged model with --merge.",
                )
            saved[theirs.rpartition(".")[0]] = None
            content[f"base_model.model.{theirs}"] = tensor.detach().cpu().contiguous()
            if model.tie_word_embeddings and theirs == _EMBEDDING:  # PEFT reads both
                content[f"base_model.model.{_TIED}"] = tensor.detach().cpu().clone()
            continue
        layer, _, part = name.rpartition(".")
        module = layout[f"{layer}.weight"].tensor.removesuffix(".weight")
        if is_new_rows(name):
            first = model.vocab_size - len(tensor)
            token_indices[module.rpartition(".")[2]] = [*range(first, model.vocab_size)]
            content[f"base_model.model.{module}.{_TOKEN_ROWS}"] = tensor.detach().cpu().contiguous()
            continue
        own = adapter.of(layer) or adapter
        modules.setdefault(module, {}).setdefault(layer, (own, {}))[1][part] = tensor.detach().cpu()
    rank = _rank_of_all(modules) if any(len(parts) > 1 for parts in modules.values()) else None
    owned: dict[str, AdapterConfig] = {}
    for module, parts in modules.items():
        by_rows = {layout[f"{layer}.weight"]: part for layer, part in parts.items()}
        owned[module], stored = _stored_adapter(by_rows, rank)
        content |= {f"base_model.model.{module}.{_PARTS[part]}": one for part, one in stored.items()}
    common = adapter if rank is None else next(iter(owned.values()))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": common.rank,
        "lora_alpha": _plain(common.alpha),
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.method == "rslora",
        "use_dora": adapter.has_magnitudes,
        "target_modules": _targets(modules, model),
        "rank_pattern": {name: own.rank for name, own in owned.items() if own.rank != common.rank},
        "alpha_pattern": {
            name: _plain(own.alpha) for name, own in owned.items() if own.alpha != common.alpha
        },
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": _targets(_outermost(saved), model) or None,
        **({"ensure_weight_tying": True} if model.tie_word_embeddings and saved else {}),
        **({"trainable_token_indices": token_indices} if token_indices else {}),
    }
    metadata = {"format": "pt", _BASE_HASH: base_hash, _BASE_WEIGHTS: adapter.base}
    with appearing(folder) as temporary:
        safetensors_torch.save_file(content, temporary / _WEIGHTS, metadata=metadata)
        write_texts(temporary, {_CONFIG: json.dumps(settings, indent=1) + "\n", **(extra_files or {})})


_Parts = dict[str, tuple[AdapterConfig, dict[str, Tensor]]]
"""Adapted layers of a stored matrix: name -> the layer's adapter, and its tensors."""


def _rank_of_all(modules: Mapping[str, _Parts]) -> int:
    """Return the largest rank of a stored matrix, whose layers' ranks add up."""
    return max(sum(own.rank for own, _ in parts.values()) for parts in modules.values())


def _stored_adapter(
    parts: Mapping[StoredRows, tuple[AdapterConfig, Mapping[str, Tensor]]], rank: int | None
) -> tuple[AdapterConfig, dict[str, Tensor]]:
    """Return the adapter of a stored matrix, given those of the parts of it that are layers of ours.

    A has the layers' own A, one below the other. B has the B of a layer in the layer's rows and columns, and
    zeros elsewhere.

    Args:
        parts: place of each layer -> its adapter, and its "lora_a" [r, inputs], "lora_b" [outputs, r] and
            "magnitude" [outputs].
        rank: filled up to with zeros, because some readers know one rank for a folder; None: its own.
    """
    ((first, like), *_), (rows, *_) = parts.values(), parts
    rank = rank or first.rank
    alpha = first.scale * (math.sqrt(rank) if first.method == "rslora" else rank)
    own = first if rank == first.rank else replace(first, rank=rank, alpha=alpha)
    stored = {
        "lora_a": like["lora_a"].new_zeros(rank, like["lora_a"].shape[1]),
        "lora_b": like["lora_b"].new_zeros(rows.num_rows, rank),
    }
    if "magnitude" in like:
        stored["magnitude"] = like["magnitude"].new_zeros(rows.num_rows)
    at = 0
    for place, (part, pair) in parts.items():
        here, columns = torch.tensor(place.rows), slice(at, at + part.rank)
        stored["lora_a"][columns] = pair["lora_a"]
        stored["lora_b"][here, columns] = pair["lora_b"] * (part.scale / first.scale)
        if "magnitude" in pair:
            stored["magnitude"][here] = pair["magnitude"]
        at += part.rank
    return own, stored


def _plain(number: float) -> float:
    return int(number) if number == int(number) else number


def _outermost(modules: Collection[str]) -> list[str]:
    """Return the modules that are in no other one: PEFT trains a module whole with all that is in it."""
    return [name for name in modules if not any(name.startswith(f"{outer}.") for outer in modules)]


def _targets(modules: Collection[str], model: DecoderConfig) -> list[str]:
    """Return PEFT's names of modules: last parts if all modules that have them are among these."""
    every = [stored.tensor.rpartition(".")[0] for stored in model.stored_rows.values()]
    short = {name.rpartition(".")[2] for name in modules}
    if all(name in modules for name in every if name.endswith(tuple(short))):
        return list(dict.fromkeys(name.rpartition(".")[2] for name in modules))
    return list(modules)


def _read_tensors(
    folder: Path, config: DecoderConfig, *, place: TensorParallelRank, base_hash: str
) -> dict[str, dict[str, Tensor]]:
    """Return "A", "B" and "magnitude" of each layer, by its name."""
    layers: dict[str, dict[str, StoredRows]] = {}
    for ours, stored in config.stored_rows.items():
        layers.setdefault(stored.tensor.removesuffix(".weight"), {})[ours] = stored
    found: dict[str, dict[str, Tensor]] = {}
    try:
        with safetensors.safe_open(folder / _WEIGHTS, framework="pt") as file:
            whole = saved_modules(read_settings(folder))
            _check_base(folder, (file.metadata() or {}).get(_BASE_HASH), base_hash)
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if _TOKENS.fullmatch(name) or _saved_name(name, whole):  # read_new_rows, read_saved_modules
                    continue
                if name == _FROZEN_OUTPUT and _is_of_this_size(file, name, config):
                    continue
                parts, which = _layers_of(name, layers, folder)
                for ours, stored in parts.items():
                    # the rank with the logits has those of all ids
                    of_output = ours.startswith(OUTPUT_MATRIX)
                    part = None if of_output else _part(slice_of(ours, config, place), which)
                    rows = None if which == "A" or stored.is_whole else _fitting(file, name, stored, folder)
                    tensor = read_slice(file, name, part, rows=rows)
                    found.setdefault(ours.removesuffix(".weight"), {})[which] = tensor
    except (safetensors.SafetensorError, OSError) as error:
        raise ModelError(f"{folder / _WEIGHTS} cannot be read: {error}", fix="Save it again.") from None
    if not found:
        raise ModelError(f"{folder} adapts no layer", fix="Check the target_modules of its training.")
    return found


def _is_of_this_size(file: Any, name: str, config: DecoderConfig) -> bool:  # Any: no type in safetensors
    shape = file.get_slice(name).get_shape()
    return tuple(shape) == (config.vocab_size, config.hidden_size)


def _check_base(folder: Path, trained_on: str | None, base_hash: str) -> None:
    if trained_on and base_hash and trained_on != base_hash:
        raise ModelError(
            f"The adapter in {folder} was trained on other weights ({trained_on[:16]}) than those of this "
            f"model ({base_hash[:16]}): its answers would be wrong",
            fix=f"Open the model that {_CONFIG} names, or tune this one.",
        )


def read_settings(folder: Path) -> Mapping[str, Any]:  # Any: JSON
    """Read adapter_config.json; refuse what can be refused without the model.

    Raises:
        ModelError: the folder is not a LoRA adapter, or uses an unsupported feature.
    """
    path = folder / _CONFIG
    if not folder.is_dir():
        raise ModelError("No such adapter folder", got=str(folder), fix="Download it first.")
    if not path.is_file():
        raise ModelError(f"{folder} has no {_CONFIG}", fix=_where_an_adapter_may_be(folder))
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
    _check_values(path, settings)
    return settings


def _where_an_adapter_may_be(folder: Path) -> str:
    if (folder / INDEX_FILE).is_file() or (folder / CHECKPOINTS).is_dir():
        command = f"penstock export {shlex.quote(str(folder))} --out FOLDER"
        return f"Write its adapter with `{command}`, and give FOLDER."
    below = min(folder.glob(f"*/{_CONFIG}"), default=None)  # PEFT's place for named adapters
    return f"Give {below.parent}." if below else "Give the folder of a LoRA adapter saved by PEFT."


def _check_values(path: Path, settings: Mapping[str, Any]) -> None:
    whole = settings.get("modules_to_save")
    if whole and not (isinstance(whole, list) and all(isinstance(name, str) and name for name in whole)):
        raise ModelError(f"{path}: modules_to_save must be a list of names", got=whole, fix=_PLAIN)
    ranks, alphas = _table(path, settings, "rank_pattern"), _table(path, settings, "alpha_pattern")
    for name, rank in (("r", settings.get("r")), *(("rank_pattern", rank) for rank in ranks)):
        if type(rank) is not int or not 1 <= rank <= MAX_RANK:
            raise ModelError(
                f"{path}: {name} must be a whole number from 1 to {MAX_RANK}", got=rank, fix=_PLAIN
            )
    for name, alpha in (("lora_alpha", settings.get("lora_alpha")), *(("alpha_pattern", a) for a in alphas)):
        # An int of JSON may be larger than any float.
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not abs(alpha) <= sys.float_info.max:
            raise ModelError(f"{path}: {name} must be a finite number", got=alpha, fix="Save it again.")


def _table(path: Path, settings: Mapping[str, Any], key: str) -> list[Any]:
    """Return the values of a table of patterns.

    A folder may be another's, and some regular expressions take minutes for one name. Those with a group that
    repeats, or with many repetitions, are refused.

    Raises:
        ModelError: it is no table, or a key is no regular expression that is matched quickly.
    """
    table = settings.get(key) or {}
    if not isinstance(table, dict) or len(table) > _MAX_PATTERNS or not all(map(_is_quick, table)):
        raise ModelError(
            f"{path}: {key} must be a table of at most {_MAX_PATTERNS:,} names or simple patterns of names",
            got=table,
            fix=_PLAIN,
        )
    return list(table.values())


def _is_quick(pattern: str) -> bool:
    r"""Return True for a regular expression without repeated groups, with few repetitions.

    >>> _is_quick(r"layers\.[0-9]+\.(q|v)_proj"), _is_quick("([a-z.]+)+!")
    (True, False)
    """
    repeats = re.findall(r"[*+{]", pattern)
    if len(pattern) > _LONGEST_PATTERN or len(repeats) > _MAX_REPEATS or re.search(r"\)[*+{]", pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _fitting(file: Any, name: str, stored: StoredRows, folder: Path) -> Sequence[int]:  # Any: as above
    """Return the rows of a stored B or magnitude that belong to a layer of ours.

    Raises:
        ModelError: it has another number of rows than the matrix that it adapts.
    """
    shape = file.get_slice(name).get_shape()
    if shape[0] != stored.num_rows:
        raise ModelError(
            f"{folder / _WEIGHTS}: {name} has {shape[0]} rows, this model needs {stored.num_rows}", fix=_CHECK
        )
    return stored.rows


def _layers_of(
    name: str, layers: Mapping[str, Mapping[str, StoredRows]], folder: Path
) -> tuple[Mapping[str, StoredRows], str]:
    """Return our weights that a stored tensor adapts, with their rows, and "A", "B" or "magnitude"."""
    match = _TENSOR.fullmatch(name)
    parts = layers.get(match["layer"], {}) if match else {}
    ours = next(iter(parts), "")
    outer = next((layer for layer in ("embed_tokens", "lm_head") if f".{layer}." in name), None)
    if match is None and outer:
        raise ModelError(
            f"{folder / _WEIGHTS} changes {outer} itself, and adapters change layers by thin matrices only",
            got=name,
            fix=f"If it was not trained, save with save_embedding_layers=False. {_PLAIN}",
        )
    if match is None or not ours.startswith(("layers.", OUTPUT_MATRIX)) or "norm" in ours:
        raise ModelError(
            f"{folder / _WEIGHTS} has a tensor that adapts no linear layer of this model",
            got=name,
            fix=_CHECK,
        )
    return parts, "magnitude" if match["which"].startswith("magnitude") else match["which"][0]


def _part(part: Slice | None, which: str) -> Slice | None:
    """Return a rank's slice of A [r, inputs], B [outputs, r] or magnitudes [outputs], given its slice of
    [outputs, inputs]."""
    return part if part is not None and part[0] == (1 if which == "A" else 0) else None


def _shapes(config: DecoderConfig, place: TensorParallelRank) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every linear layer of a rank's blocks and of the whole output matrix."""
    with unfilled():
        model = Decoder(sliced_config(config, place))
    shapes = {
        name: (layer.out_features, layer.in_features)
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear)
    }
    return {**shapes, OUTPUT_MATRIX: (config.vocab_size, config.hidden_size)}


def _patterns(settings: Mapping[str, Any]) -> AdapterConfig:
    """Return the rank and the alpha of every layer, of which the tensors say whether it is adapted."""
    return AdapterConfig(
        method="dora" if settings.get("use_dora") else "lora",
        rank=settings["r"],
        alpha=settings["lora_alpha"],
        layers=LINEAR_LAYERS,
        unembed=True,
        ranks=tuple((settings.get("rank_pattern") or {}).items()),
        alphas=tuple((settings.get("alpha_pattern") or {}).items()),
    )


def _scale(own: AdapterConfig, settings: Mapping[str, Any]) -> float:
    return own.alpha / (math.sqrt(own.rank) if settings.get("use_rslora") else own.rank)


def _check_parts(
    folder: Path, name: str, pair: Mapping[str, Tensor], own: AdapterConfig, shape: tuple[int, int]
) -> None:
    expected: dict[str, tuple[int, ...]] = {"A": (own.rank, shape[1]), "B": (shape[0], own.rank)}
    if own.has_magnitudes:
        expected["magnitude"] = (shape[0],)
    shapes = {which: tuple(tensor.shape) for which, tensor in pair.items()}
    if shapes != expected:
        raise ModelError(
            f"{folder / _WEIGHTS}: the tensors of {name} have shapes {shapes}, this model needs {expected}",
            fix=_CHECK,
        )
    if others := [str(tensor.dtype) for tensor in pair.values() if tensor.dtype not in _DTYPES]:
        raise ModelError(
            f"{folder / _WEIGHTS}: the tensors of {name} are neither float16, bfloat16 nor float32",
            got=others[0].removeprefix("torch."),
            fix="Save it again in one of these.",
        )
    if not all(bool(tensor.isfinite().all()) for tensor in pair.values()):
        raise ModelError(
            f"{folder / _WEIGHTS}: the tensors of {name} have non-finite values", fix="Train it again."
        )


_MERGE_THERE = "Merge it into the base model with PEFT and open that."
_CHECK = "Check that the adapter was trained for this model."
_PLAIN = "Train it as plain LoRA, or merge it into the base model with PEFT and open that."
