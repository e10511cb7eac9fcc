"""Models with an adapter merged: of runs that tuned one, and of folders that PEFT writes.

A checkpoint of such a run has what was learned, and names the base. The adapter is merged as the model is
opened, matrix by matrix and in float32, so that whatever serves, scores or exports models needs not know of
it. A base that was rounded to 8 or 4 bits for tuning is rounded here too: the merged model computes what was
tuned.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from penstock.checkpoint.find import SavedCheckpoint
from penstock.checkpoint.layout import MODEL, CheckpointIndex, Meta
from penstock.checkpoint.load import fill_boxes
from penstock.checkpoint.load_start import fill_start
from penstock.checkpoint.peft import (
    base_weights_of,
    read_adapter,
    read_new_rows,
    read_saved_modules,
    read_settings,
)
from penstock.checkpoint.start import StartWeights, find_start, text_folder
from penstock.core.boxes import whole
from penstock.core.errors import CheckpointError, ModelError
from penstock.core.files import TOKENIZER_FILE
from penstock.models import FAMILIES
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.adapter_config import OUTPUT_MATRIX, AdapterConfig
from penstock.nn.linear.lora import Adapter, RoundedProduct, is_of_adapter
from penstock.nn.new_rows import is_new_rows, put_new_rows
from penstock.nn.unfilled import on_device, unfilled


def base_weights(meta: Meta, *, of: object) -> StartWeights:
    """Return the weights that an adapter was trained on, and is for.

    Args:
        of: its checkpoint, for messages.

    Raises:
        CheckpointError: they are gone, or others are in their place.
    """
    folder = Path(meta.start_from)
    if not folder.is_dir():
        raise CheckpointError(
            f"{of} is an adapter for the weights in {folder}, which is no folder any more",
            fix="Put it back at that path; a link to another place will do.",
        )
    start = find_start(folder, step=meta.start_step, ignored_keys=meta.model.ignored_keys)
    if start.identity != meta.start_hash:
        raise CheckpointError(
            f"{of} is an adapter for other weights than those that are in {folder} now",
            got=start.identity,
            fix=f"Restore the ones whose identity is {meta.start_hash}.",
        )
    return start


def read_adapter_tensors(saved: SavedCheckpoint, index: CheckpointIndex) -> dict[str, Tensor]:
    """Return what was trained, by name: the adapter and modules that are trained whole. In float32.

    Raises:
        CheckpointDamaged: stored data was altered.
    """
    stored = {
        name.removeprefix(MODEL): torch.empty(entry.shape)
        for name, entry in index.tensors.items()
        if name.startswith(MODEL)
    }
    boxes = {f"{MODEL}{name}": (whole(tensor.shape), tensor) for name, tensor in stored.items()}
    fill_boxes(saved, index, boxes)
    return stored


def adapters_of(tensors: Mapping[str, Tensor], config: AdapterConfig) -> dict[str, Adapter]:
    """Return the adapter of each layer, by the layer's name."""
    layers = dict.fromkeys(
        name.rpartition(".")[0] for name in tensors if is_of_adapter(name) and not is_new_rows(name)
    )
    return {
        layer: Adapter(
            tensors[f"{layer}.lora_a"],
            tensors[f"{layer}.lora_b"],
            (config.of(layer) or config).scale,
            tensors.get(f"{layer}.magnitude"),
        )
        for layer in layers
    }


def merged_matrix(weight: Tensor, adapter: Adapter, base: str) -> Tensor:
    """Return a matrix with its adapter merged, in float32.

    Args:
        weight: [outputs, inputs] as the base has it.
        base: rounding that it was tuned with, as in AdapterConfig.
    """
    if base != "compute":
        product = RoundedProduct(weight, base)
        product.fill(weight)
        weight = product.matrix()
    return adapter.change(weight)


@torch.no_grad()
def open_merged(
    start: StartWeights,
    model: DecoderConfig,
    adapters: Mapping[str, Adapter],
    *,
    base: str,
    trained: Mapping[str, Tensor],
) -> nn.Module:
    """Return a base model with adapters merged: float32, on the CPU.

    Args:
        model: its config; may have more token ids than the base.
        adapters: by the name of the layer.
        base: as in AdapterConfig.
        trained: parameters that were trained whole, by name, and last rows of the embedding and the output
            matrix: `embed.new_rows`. Others are ignored.
    """
    with unfilled():
        network: nn.Module = FAMILIES[model.model_type](model)
    network = on_device(network)
    state = network.state_dict()
    fill_start(start, {name: (whole(tensor.shape), tensor) for name, tensor in state.items()})
    for layer, adapter in adapters.items():
        weight = state[f"{layer}.weight"]
        rounding = "compute" if layer == OUTPUT_MATRIX else base  # only blocks are tuned rounded
        weight.copy_(merged_matrix(weight, adapter, rounding))
    for name in trained.keys() & state.keys():
        state[name].copy_(trained[name])
    put_new_rows(state, trained)
    return network


def merged_model(saved: SavedCheckpoint, index: CheckpointIndex) -> nn.Module:
    """Return the model of a run's checkpoint that has an adapter: float32, on the CPU.

    Raises:
        CheckpointError: its base is gone, or another.
        CheckpointDamaged: stored data was altered.
    """
    meta = index.meta
    assert meta.adapter is not None, meta
    start = base_weights(meta, of=saved)
    tensors = read_adapter_tensors(saved, index)
    adapters = adapters_of(tensors, meta.adapter)
    return open_merged(start, meta.model, adapters, base=meta.adapter.base, trained=tensors)


def open_with_adapter(
    folder: Path, *, base: Path | None = None, ignored_keys: Collection[str] = ()
) -> tuple[Decoder, Path | None]:
    """Open an adapter's base with the adapter merged: float32, on the CPU; and the path of a tokenizer.json.

    Args:
        base: folder of the model that it adapts; None: the one that it names.
        ignored_keys: unknown keys of the base's config.json to pass over, with a warning.

    Raises:
        ModelError: the adapter is not one of this model, or names none that is here.
    """
    settings = read_settings(folder)
    named = base or settings.get("base_model_name_or_path")
    if not named or not isinstance(named, str | Path) or not Path(named).is_dir():
        raise ModelError(
            f"The adapter in {folder} names a base model that is no folder here",
            got=named,
            fix="Give the folder of that model with --base.",
        )
    start = find_start(Path(named), ignored_keys=ignored_keys)
    adapters = read_adapter(folder, start.model, base_hash=start.identity)
    new_rows, saved = read_new_rows(folder, start.model), read_saved_modules(folder, start.model)
    num_rows = start.model.vocab_size + max(map(len, new_rows.values()), default=0)
    whole_rows = [len(saved[name]) for name in ("embed.weight", "unembed.weight") if name in saved]
    grown = replace(start.model, vocab_size=max([num_rows, *whole_rows]))
    trained = {**saved, **new_rows}
    model = open_merged(start, grown, adapters, base=base_weights_of(folder), trained=trained)
    places = (folder, text_folder(start.folder))
    tokenizer = next((found for place in places if (found := place / TOKENIZER_FILE).is_file()), None)
    return cast(Decoder, model).eval(), tokenizer
