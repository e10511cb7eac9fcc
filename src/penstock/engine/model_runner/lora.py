"""Adapters of an engine, each request with its own or none: loaded, measured, removed, and told each step.

What they do to a layer is in adapted_linear.py, and to the vocabulary in new_tokens.py. DoRA's factors are
computed once, from the matrices as the engine holds them, rounded or not, by all ranks together: each has a
part of the rows' squared lengths.

Layers are wrapped when modules first compute a step; steps that the native decoder computes
(native_decoder.py) leave them as they are. Updates of the output matrix are applied to the logits after
either, on the rank that has them.
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.checkpoint.peft import read_adapter, read_new_rows, read_settings, saved_modules
from penstock.core.errors import ModelError, UsageError, nearest
from penstock.engine.model_runner.adapted_linear import (
    AdaptedLinear,
    AdapterUpdate,
    Added,
    Site,
    Step,
    neutral_scaling,
    sites_of,
)
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.collectives import RankGroup
from penstock.engine.model_runner.new_tokens import NewTokens
from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import ALONE
from penstock.nn.linear.adapter_config import OUTPUT_MATRIX
from penstock.nn.linear.lora import Adapter, factors
from penstock.nn.new_rows import NEW_ROWS
from penstock.nn.softcap import capped
from penstock.nn.upload import uploaded


class Adapters:
    """Adapters of an engine, by name; added and removed between steps.

    Args:
        model: this rank's shard; adapted layers are wrapped in place.
        whole: config of the unsharded model.
        group: the tensor-parallel group, joined by the first step; None: one rank.
        base_hash: identity of the model's weights; "": unknown.
    """

    def __init__(
        self, model: Decoder, whole: DecoderConfig, *, group: RankGroup | None = None, base_hash: str = ""
    ) -> None:
        self.indexes: dict[str, int] = {}
        """Adapter name -> index in a batch; indices are never reused."""
        self.num_new_tokens: dict[str, int] = {}
        """Adapter name -> tokens that it adds to the vocabulary."""
        self._model, self._whole, self._group, self._base_hash = model, whole, group, base_hash
        self._place = ALONE if group is None else group.place
        self._updates: dict[int, dict[str, AdapterUpdate]] = {}  # of each layer, by name in the plain network
        self._magnitudes: dict[int, dict[str, Tensor]] = {}  # of DoRA adapters that are not measured yet
        self._of_output: dict[int, AdapterUpdate] = {}  # on the device of the logits
        self._scaling: list[int] = []  # DoRA adapters
        self._owners = np.zeros(0, np.int32)  # [all rows] index of each row's adapter
        self._new_tokens = NewTokens(whole)
        self._step = Step()
        self._next_index = 0
        self._is_current = True  # False: the layers have not been rebuilt since the adapters changed

    def add(self, name: str, folder: Path) -> None:
        """Load an adapter from a folder written by PEFT.

        Raises:
            UsageError: the name is taken or empty.
            ModelError: as in `read_adapter` and `read_new_rows`.
        """
        if not name:  # batches and block hashes use the empty name for the base model
            raise UsageError("The name of an adapter is empty", got=name, fix="Give it a name.")
        if name in self.indexes:
            raise UsageError("An adapter of that name exists", got=name, fix="Remove it first.")
        if whole := saved_modules(read_settings(folder)):
            raise ModelError(
                f"{folder} has modules that are trained whole, which requests cannot have of their own",
                got=", ".join(whole),
                fix=f"Write a model with `penstock export {shlex.quote(str(folder))} --merge --out DIR`, and "
                "serve that.",
            )
        found = read_adapter(folder, self._whole, place=self._place, base_hash=self._base_hash)
        rows = read_new_rows(folder, self._whole)
        rank = max(len(adapter.a) for adapter in found.values())
        updates = {layer: self._update(layer, _padded(adapter, rank)) for layer, adapter in found.items()}
        index = self._next_index
        if rows:
            like = self._model.norm.weight
            of_embedding = rows[f"embed.{NEW_ROWS}"].to(like)
            of_output = rows.get(f"unembed.{NEW_ROWS}", of_embedding).to(like)
            self._new_tokens.add(index, of_embedding, of_output)
        self.num_new_tokens[name] = max(map(len, rows.values()), default=0)
        self._updates[index] = updates
        # at last: where memory was short above, nothing was added, and the ranks agree on the next index
        self.indexes[name], self._next_index = index, index + 1
        magnitudes = {layer: each.magnitude for layer, each in found.items() if each.magnitude is not None}
        if magnitudes:
            self._magnitudes[index] = magnitudes
        self._change()

    def _update(self, layer: str, adapter: Adapter) -> AdapterUpdate:
        a, b, like = adapter.a, adapter.b * adapter.scale, self._model.norm.weight
        return AdapterUpdate(a.to(like), b.to(like)) if layer == OUTPUT_MATRIX else AdapterUpdate(a, b)

    @torch.no_grad()
    def measure(self) -> None:
        """Compute the factors of DoRA adapters that were added since the last call; all ranks together."""
        if not self._magnitudes:
            return
        magnitudes = self._magnitudes
        rows = self._place.part(self._whole.vocab_size)
        output = Site(
            self._model, OUTPUT_MATRIX, {OUTPUT_MATRIX: slice(None)}, True, slice(rows.start, rows.stop)
        )
        for site in (*sites_of(self._model), output):
            wanted = [(i, name) for i, found in magnitudes.items() for name in site.parts if name in found]
            if not wanted:
                continue
            matrix, bias = site.matrix_and_bias(self._model.norm.weight.dtype)
            for index, name in wanted:
                update, outputs = self._updates[index][name], site.parts[name]
                squares = site.squared_lengths(update, matrix[outputs])
                if site.is_shared and self._group is not None:
                    squares = self._group.sum(squares)
                scales = factors(magnitudes[index][name].to(squares), squares)
                shifts = torch.zeros_like(scales) if bias is None else bias[outputs] * (1.0 - scales)
                self._updates[index][name] = replace(update, scaling=torch.stack([scales, shifts]))
        self._magnitudes = {}  # at last: where memory is short, the next step measures again
        self._change()

    def held(self, name: str) -> tuple[int, Mapping[str, AdapterUpdate]]:
        """Return an adapter's index, and its update of each layer, by layer name in the plain network."""
        index = self.indexes[name]
        return index, self._updates[index]

    def remove(self, name: str) -> int:
        """Remove an adapter; return the index it had.

        Raises:
            UsageError: the name is unknown.
        """
        if name not in self.indexes:
            raise UsageError("Unknown adapter", got=name, fix=nearest(name, list(self.indexes)))
        index = self.indexes.pop(name)
        del self._updates[index]
        self._magnitudes.pop(index, None)
        self._new_tokens.remove(index)
        del self.num_new_tokens[name]
        self._change()
        return index

    @property
    def new_rows(self) -> Tensor | None:
        """Rows of the embedding behind those of the base, as `NewTokens.table`."""
        return self._new_tokens.table

    def have_new_tokens(self, batch: StepBatch) -> bool:
        """Return True if an adapter of a step adds tokens to the vocabulary."""
        return any(self.indexes[name] in batch.adapters for name, new in self.num_new_tokens.items() if new)

    def placed(self, batch: StepBatch) -> StepBatch:
        """Return a step whose token ids are rows of the embedding; see `NewTokens.placed`."""
        return self._new_tokens.placed(batch)

    def begin(self, batch: StepBatch) -> None:
        """Tell the layers whose tokens a batch has; not called for steps of the native decoder."""
        self.measure()
        if not self._is_current:
            self._rebuild()
        if not self._updates:
            return
        used = np.isin(self._owners, batch.adapters)
        self._step.mine = self._step.places = None
        if not used.any():
            return
        like = self._model.norm.weight
        first, last = np.flatnonzero(used)[[0, -1]].tolist()
        self._step.rows = slice(first, last + 1)
        of_token = np.repeat(batch.adapters, np.diff(batch.query_starts))
        mine = of_token[:, None] == self._owners[None, self._step.rows]
        self._step.mine = uploaded([mine], like.device)[0].to(like.dtype)
        if np.isin(batch.adapters, self._scaling).any():
            held = np.array([*self._updates], np.int32)  # ascending
            places = np.where(of_token < 0, len(held), np.searchsorted(held, of_token))
            [self._step.places] = uploaded([places], like.device)

    def adapted_logits(
        self, logits: Float[Tensor, "r vocab"], hidden: Float[Tensor, "t hidden"], batch: StepBatch
    ) -> Float[Tensor, "r wide"]:
        """Return a step's logits with the updates of the output matrix, capped, and columns for new tokens.

        Args:
            logits: of `batch.logit_rows`, before a softcap; changed in place; of no token ids on a rank that
                does not have them.
            hidden: normalised hidden states, defined for those rows at least.
        """
        if self._of_output and logits.shape[1]:
            self._update_logits(logits, hidden, batch)
        logits = capped(logits, self._whole.final_logit_softcapping)
        return self._new_tokens.with_columns(logits, hidden, batch)

    def _update_logits(self, logits: Tensor, hidden: Tensor, batch: StepBatch) -> None:
        of_logits = np.repeat(batch.adapters, np.diff(batch.query_starts))[batch.logit_rows]
        for index, update in self._of_output.items():
            mine = np.flatnonzero(of_logits == index)
            if len(mine):
                tokens, rows = (
                    torch.from_numpy(array).to(logits.device) for array in (batch.logit_rows[mine], mine)
                )
                low = nn.functional.linear(hidden[tokens], update.a)
                change = nn.functional.linear(low, update.b) / self._whole.logits_scaling
                changed = logits[rows] + change
                if update.scaling is not None:  # its shifts are 0: there is no bias
                    changed = changed * update.scaling[0]
                logits[rows] = changed.to(logits.dtype)

    def _change(self) -> None:
        self._is_current = False
        self._of_output = {
            index: updates[OUTPUT_MATRIX]
            for index, updates in self._updates.items()
            if OUTPUT_MATRIX in updates
        }
        if self._model.norm.weight.device.type != "cpu":
            self._rebuild()  # now: pages take the free memory of a GPU before the first step

    def _rebuild(self) -> None:
        self._is_current = True
        ranks = {index: len(next(iter(updates.values())).a) for index, updates in self._updates.items()}
        self._owners = np.repeat(np.array([*ranks], np.int32), [*ranks.values()])
        self._scaling = [
            index
            for index, updates in self._updates.items()
            if any(update.scaling is not None for update in updates.values())
        ]
        names = {name for updates in self._updates.values() for name in updates}
        self._new_tokens.wrap(self._model)
        for site in list(sites_of(self._model)):
            layer = site.wrapped(self._step)
            for name, outputs in site.parts.items():
                if name in names:
                    layer.added[name] = self._stacked(name, ranks, outputs)
                else:
                    layer.added.pop(name, None)
        if not self._updates:  # plain layers again: fewer calls per block
            _unwrap(self._model)
            self._new_tokens.unwrap(self._model)

    def _stacked(self, name: str, ranks: Mapping[int, int], outputs: slice) -> Added:
        """Stack the adapters' matrices for one layer; zeros for adapters that do not change it."""
        like, found = self._model.norm.weight, [updates.get(name) for updates in self._updates.values()]
        some = next(update for update in found if update is not None)
        a = torch.zeros(len(self._owners), some.a.shape[1], dtype=like.dtype, device=like.device)
        b = torch.zeros(some.b.shape[0], len(self._owners), dtype=like.dtype, device=like.device)
        scaling = neutral_scaling(len(b)).to(a.device).unsqueeze(1).repeat(1, len(found) + 1, 1)
        start = 0
        for place, (rank, update) in enumerate(zip(ranks.values(), found, strict=True)):
            rows, start = slice(start, start + rank), start + rank
            if update is not None:
                a[rows], b[:, rows] = update.a, update.b
                if update.scaling is not None:
                    scaling[:, place] = update.scaling
        changing = (table if bool((table != table[-1]).any()) else None for table in scaling)
        return Added(outputs, a, b, *changing)


def _padded(adapter: Adapter, rank: int) -> Adapter:
    """Return an adapter that computes the same with more rows of A and columns of B, which are zero."""
    more = rank - len(adapter.a)
    if not more:
        return adapter
    pad = nn.functional.pad
    return replace(adapter, a=pad(adapter.a, (0, 0, 0, more)), b=pad(adapter.b, (0, more)))


def _unwrap(model: nn.Module) -> None:
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, AdaptedLinear):
                setattr(owner, name, child.linear)
