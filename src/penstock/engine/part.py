"""A rank's share of an engine: its part of the model, ready to compute, its pages and its runner.

The first rank and all others open theirs here, in one order; a process alone is the only rank of one. Layers
are swapped in this order: slices of plain layers are fused and merged, those whose results are summands get
their sum, and the linear layer inside, wherever it is, is packed. What adapters add goes around that layer,
on CPUs only when modules first compute a step (adapters.py).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.core import env
from penstock.core.errors import ConfigError
from penstock.engine.adapter_file import read_settings
from penstock.engine.adapters import Adapters
from penstock.engine.config import EngineConfig
from penstock.engine.fuse import fuse
from penstock.engine.kv_cache import PagedCache, type_of_pages
from penstock.engine.open import open_config, open_model
from penstock.engine.ranks.group import RankGroup
from penstock.engine.ranks.tensor_parallel import join_ranks
from penstock.engine.runner import Runner
from penstock.engine.weights import convert, prepare
from penstock.models.llama.model import Llama
from penstock.models.llama.slices import ALONE, Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank has."""

    model: Llama
    """This rank's part; its `config` says the sizes of the part, but the whole vocabulary."""
    adapters: Adapters
    device: torch.device
    dtype: torch.dtype
    """Of activations."""
    pages_dtype: torch.dtype
    """Of keys and values: that of activations, or int8."""
    group: RankGroup | None
    """The ranks that share each layer; None: this one has all of it."""

    def runner(self, *, num_blocks: int, block_size: int) -> Runner:
        """Make pages and what computes with them; the ranks have met by then."""
        config = self.model.config
        cache = PagedCache(
            config.num_hidden_layers,
            num_blocks=num_blocks + 1,  # one that no sequence has, for what a compiler runs
            block_size=block_size,
            kv_heads=config.key_value_heads,
            head_dim=config.size_of_head,
            dtype=self.pages_dtype,
            device=self.device,
        )
        return Runner(self.model, cache, self.adapters, group=self.group)

    def close(self) -> None:
        """Leave the other ranks; once more does nothing."""
        if self.group is not None:
            self.group.close()


def open_part(path: Path, config: EngineConfig, *, place: Place = ALONE) -> tuple[Part, Path | None]:
    """Open a rank's part of the model of a folder; return it and the folder's tokenizer.json if it has one.

    Raises:
        UsageError, ModelError, CheckpointError: as in `open_model`, and of adapters.
    """
    device = _device(config.device, place)
    if place.ranks > 1 and device.type == "cpu":
        torch.set_num_threads(env.num_threads(place.ranks))
    whole = open_config(path)
    for folder in config.adapters.values():
        read_settings(Path(folder))  # before the model is read, which takes long
    model, tokenizer_path = open_model(path, place=place)
    model = model.to(device)
    convert(model, config.weights)
    dtype = model.norm.weight.dtype
    pages_dtype = type_of_pages(config.cache, dtype=dtype, head_dim=whole.size_of_head)
    fuse(model)
    group = None if place.ranks == 1 else RankGroup(place, device)
    if group is not None:
        join_ranks(model, whole, group)
    adapters = Adapters(model, whole, place=place)
    for name, folder in config.adapters.items():
        adapters.add(name, Path(folder))
    prepare(model, config.weights)
    part = Part(
        model=model, adapters=adapters, device=device, dtype=dtype, pages_dtype=pages_dtype, group=group
    )
    return part, tokenizer_path


def _device(asked: str | None, place: Place) -> torch.device:
    try:
        device = torch.device(asked or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ConfigError("No such device", got=asked, fix="Choose cpu or cuda, or leave it out.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        fix = "Leave it out to compute on the CPU, or install a torch for this machine's GPU."
        raise ConfigError("torch finds no GPU here", got=asked, fix=fix)
    return torch.device(device.type, place.rank) if device.type == "cuda" and place.ranks > 1 else device
