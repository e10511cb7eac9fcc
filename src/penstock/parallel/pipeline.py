"""Pipeline parallel: each rank of an axis has some of the blocks, and micro-batches flow through them.

The order is one forward, one backward in turn (Narayanan et al., "PipeDream", 2019), by
torch.distributed.pipelining: a rank holds the activations of at most as many micro-batches as there are
stages. Of m micro-batches over p stages, (p - 1) / (m + p - 1) of the time is idle.

A stage is the whole model with what other stages have left out, so every parameter keeps its name, and
with it its initial values and its place in a checkpoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

Inputs = Mapping[str, Any]
"""What the model's forward takes for one micro-batch, by name."""


class Elsewhere(nn.Module):
    """Stands where another stage has a module; passes on what it is given."""

    weight = None

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return `x`."""
        return x


def blocks_of(stage: int, *, stages: int, num_blocks: int) -> range:
    """Return the blocks of a stage: even shares, the earlier stages one less where it does not divide.

    >>> [list(blocks_of(stage, stages=2, num_blocks=5)) for stage in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(stage * num_blocks // stages, (stage + 1) * num_blocks // stages)


def keep_stage(model: nn.Module, mesh: DeviceMesh, *, slices: int, dtype: torch.dtype) -> "Pipeline":
    """Leave this rank's stage of a model, in place; return what runs its training steps.

    Called by itself, without gradients, the model passes its input through all stages and returns what
    the last one finds; on the other ranks, 0.

    Args:
        model: has `embed`, `layers`, `norm` and `unembed`; on the meta device.
        mesh: of one axis, its ranks the stages.
        slices: ranks over which tensor parallelism cuts the tokens of hidden states.
        dtype: of hidden states.
    """
    layers = cast(nn.ModuleList, model.layers)
    mine = blocks_of(mesh.get_local_rank(), stages=mesh.size(), num_blocks=len(layers))
    for index in set(range(len(layers))) - set(mine):
        layers[index] = Elsewhere()
    pipeline = Pipeline(model, mesh, slices=slices, dtype=dtype)
    if not pipeline.is_first:
        model.embed, model.embedding_multiplier = Elsewhere(), 1.0  # type: ignore[assignment]
    if not pipeline.is_last:
        model.norm, model.unembed = Elsewhere(), Elsewhere()
    model.register_forward_pre_hook(pipeline.receive, with_kwargs=True)
    model.register_forward_hook(pipeline.send)
    return pipeline


class Pipeline:
    """The stage of this rank, and the order in which it works with the others."""

    def __init__(self, model: nn.Module, mesh: DeviceMesh, *, slices: int, dtype: torch.dtype) -> None:
        self._model, self._slices, self._dtype = model, slices, dtype
        self._group, self._index, self._size = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        self._made: tuple[Any, _Ready] | None = None

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self._index == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self._index == self._size - 1

    def step(self, parts: Sequence[Inputs]) -> Tensor:
        """Run the forward and backward passes of all micro-batches; return the sum of what `finish` gave.

        Args:
            parts: what the forward takes, micro-batch by micro-batch, at least as many as stages; `finish`
                gives a float32 scalar.
        """
        schedule = self._schedule(parts)
        losses: list[Tensor] = []
        target = torch.zeros(len(parts)) if self.is_last else None  # not used: the model computes the loss
        schedule.parts = [self._inputs(part) for part in parts]
        schedule.step(target=target, losses=losses, return_outputs=False)
        return (
            torch.stack(losses).detach().sum()
            if losses
            else torch.zeros((), device=parts[0]["input_ids"].device)
        )

    def _inputs(self, part: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        others = {name: value for name, value in part.items() if name != "input_ids"}
        args = (part["input_ids"],) if self.is_first else ()
        return args, others if self.is_last else {**others, "finish": _pass_on}

    def _schedule(self, parts: Sequence[Inputs]) -> "_Ready":
        ids = parts[0]["input_ids"]
        key = len(parts), ids.shape
        if self._made is None or self._made[0] != key:  # sizes change where the recipe plans it: seldom
            between = self._hidden(ids, device="meta").requires_grad_()
            loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
            stage = PipelineStage(
                self._model,
                self._index,
                self._size,
                ids.device,
                input_args=ids.to("meta") if self.is_first else between,
                output_args=loss if self.is_last else between,
                group=self._group,
            )
            self._made = key, _Ready(stage, len(parts), loss_fn=lambda loss, _: loss, scale_grads=False)
        return self._made[1]

    def _hidden(self, ids: Tensor, device: torch.device | str) -> Tensor:
        """Return room for the hidden states of tokens [batch, seq], as they travel between stages."""
        batch, length = ids.shape
        size = cast(Any, self._model).config.hidden_size
        return torch.empty(batch, length // self._slices, size, dtype=self._dtype, device=device)

    def receive(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:  # Any: torch's hook
        """Take the hidden states of the stage before in place of tokens, in a call without gradients."""
        if torch.is_grad_enabled():
            return None
        if not self.is_first:
            hidden = self._hidden(args[0], args[0].device)
            dist.recv(hidden, group=self._group, group_src=self._index - 1)
            args = (hidden, *args[1:])
        return args, (kwargs if self.is_last else {**kwargs, "finish": _pass_on})

    def send(self, _: nn.Module, _args: Any, out: Tensor) -> Tensor | None:
        """Give the hidden states to the stage after, in a call without gradients."""
        if torch.is_grad_enabled() or self.is_last:
            return None
        dist.send(out.contiguous(), group=self._group, group_dst=self._index + 1)
        return out.new_zeros((), dtype=torch.float32)


class _Ready(Schedule1F1B):
    """One forward, one backward over micro-batches that were split before: documents end where they end."""

    parts: list[tuple[tuple[Tensor, ...], dict[str, Any]]]

    def _split_inputs(self, *_: Any) -> tuple[list[tuple[Tensor, ...]], list[dict[str, Any]]]:
        return [args for args, _ in self.parts], [kwargs for _, kwargs in self.parts]


def _pass_on(hidden: Tensor, _head: object) -> Tensor:
    return hidden
