"""Pipeline parallelism: each rank of an axis holds some blocks, and micro-batches flow through them.

The schedule is one forward, one backward (1F1B; Narayanan et al., "PipeDream", 2019) of
torch.distributed.pipelining: a rank holds the activations of at most as many micro-batches as there are
stages. With m micro-batches over p ranks, (p - 1) / (m + p - 1) of the time is idle; with v stages per rank,
interleaved (Narayanan et al., "Megatron-LM", 2021), (p - 1) / (v m + p - 1), for v times the messages.

A rank keeps the whole model without the modules of other ranks, so every parameter keeps its name, its
initial values and its place in a checkpoint. Its stages are views: models that share its modules, each with
some of them.

A tied embedding is on the first stage and, as the output matrix, on the last: each has a copy under the same
name. After the passes of a step the two add each other's gradients, with bit-identical results; so the same
optimizer keeps the copies equal, and a checkpoint holds them once.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from penstock.core import clock
from penstock.nn.dtensor import local
from penstock.parallel.exposed_comm import BLOCKED, waiting
from penstock.parallel.layout import blocks_of

Inputs = Mapping[str, Any]
"""Arguments of the model's forward for one micro-batch, by name."""


class Elsewhere(nn.Module):
    """Placeholder for a module of another stage; returns its input."""

    weight = None

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return `x`."""
        return x


def keep_stages(model: nn.Module, mesh: DeviceMesh, *, per_rank: int) -> None:
    """Remove the modules of other ranks' stages, in place; stages are assigned to ranks round robin.

    Args:
        model: has `config`, `embed`, `layers`, `norm` and `unembed`; on the meta device.
        mesh: one axis; stage s is on rank s modulo its size.
    """
    layers, stages = cast(nn.ModuleList, model.layers), mesh.size() * per_rank
    here = range(mesh.get_local_rank(), stages, mesh.size())
    mine = {i for stage in here for i in blocks_of(stage, stages=stages, num_blocks=len(layers))}
    for index in set(range(len(layers))) - mine:
        layers[index] = Elsewhere()
    is_last = stages - 1 in here
    if 0 not in here and not (is_last and _is_tied(model)):
        model.embed = Elsewhere()
    if not is_last:
        model.norm, model.unembed = Elsewhere(), Elsewhere()


def stages_of(model: nn.Module, mesh: DeviceMesh, *, per_rank: int) -> dict[int, nn.Module]:
    """Return this rank's stages by number: models that share modules with `model`."""
    stages = mesh.size() * per_rank
    return {
        stage: _view(model, stage, stages=stages)
        for stage in range(mesh.get_local_rank(), stages, mesh.size())
    }


def _view(model: nn.Module, stage: int, *, stages: int) -> nn.Module:
    view = copy.copy(model)
    view.__dict__ |= {name: copy.copy(value) for name, value in model.__dict__.items()}  # own hooks
    layers = cast(nn.ModuleList, model.layers)
    mine = blocks_of(stage, stages=stages, num_blocks=len(layers))
    view.layers = nn.ModuleList(block if i in mine else Elsewhere() for i, block in enumerate(layers))
    if stage > 0:
        view.embedding_multiplier = 1.0  # type: ignore[assignment]  # not a module or tensor
        if stage == stages - 1 and _is_tied(model):
            cast(nn.Module, view.embed).forward = _pass_on  # only its matrix is used, as the output matrix
        else:
            view.embed = Elsewhere()
    if stage < stages - 1:
        view.norm, view.unembed = Elsewhere(), Elsewhere()
        view.register_forward_pre_hook(_without_finish, with_kwargs=True)
    return view


def _is_tied(model: nn.Module) -> bool:
    return bool(cast(Any, model).config.tie_word_embeddings)


def _pass_on(x: Tensor) -> Tensor:
    return x


def _without_finish(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:  # Any: torch's hook
    return args, {**kwargs, "finish": lambda hidden, _head: hidden}


class CountedStage(PipelineStage):
    """Pipeline stage that measures its work and traffic. Arguments are torch's."""

    work_s = 0.0
    """Seconds in forward and backward passes and reductions, without the time blocked on other ranks."""
    sent_bytes = 0
    """Bytes of hidden states and their gradients: gloo's sends are not in the flight recorder."""

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:  # Any: torch's
        """Run the forward pass of a micro-batch."""
        with self._at_work():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backward pass of a micro-batch."""
        with self._at_work():
            return super().backward_one_chunk(*args, **kwargs)

    def perform_reduce_grad(self, *args: Any) -> None:
        """Reduce the gradients of all micro-batches."""
        with self._at_work():
            super().perform_reduce_grad(*args)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a forward pass; called once for each."""
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the sends after a backward pass; called once for each."""
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _recv_meta(self, src_stage: int) -> Any:
        """Refuse metadata of another stage, which torch would unpickle: all shapes are given."""
        raise RuntimeError(f"stage {src_stage} sent metadata, which is not expected")

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        began, blocked = clock.monotonic(), BLOCKED()
        yield
        self.work_s += clock.monotonic() - began - (BLOCKED() - blocked)

    def _counted(self, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent_bytes += sum(send.tensor.nbytes for send in sends)
        return sends


class Pipeline:
    """The stages of this rank, and their schedule.

    Args:
        views: this rank's stages by number, from `stages_of`, sharded or not.
        mesh: one axis, as there.
        slices: tensor-parallel ranks over which the tokens of hidden states are split.
        dtype: dtype of hidden states.
    """

    def __init__(
        self, views: Mapping[int, nn.Module], mesh: DeviceMesh, *, slices: int, dtype: torch.dtype
    ) -> None:
        self._views, self._slices, self._dtype = dict(sorted(views.items())), slices, dtype
        self._group, self._ranks = mesh.get_group(), mesh.size()
        self._last = mesh.size() * len(views) - 1
        self._made: tuple[Any, _OneByOne | _Interleaved] | None = None
        self._stages: list[CountedStage] = []
        self._sent_before = 0

    def step(self, parts: Sequence[Inputs]) -> Tensor:
        """Run the forward and backward passes of all micro-batches; return the sum of the `finish` results.

        Args:
            parts: forward arguments of each micro-batch, at least as many as ranks, and with several
                stages per rank a multiple of them; `finish` returns a float32 scalar.

        Returns:
            A float32 scalar; 0 on ranks without the last stage.
        """
        schedule = self._schedule(parts)
        losses: list[Tensor] = []
        # the model computes the loss, where its output matrix is whole; torch requires a target
        target = torch.zeros(len(parts)) if self._last in self._views else None
        schedule.parts = [self._inputs(part) for part in parts]
        with self._waiting_for_stages():
            schedule.step(target=target, losses=losses, return_outputs=False)
        nothing: Tensor = parts[0]["input_ids"].new_zeros((), dtype=torch.float32)
        return torch.stack(losses).detach().sum() if losses else nothing

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent to other stages in training steps."""
        return self._sent_before + sum(stage.sent_bytes for stage in self._stages)

    @contextmanager
    def _waiting_for_stages(self) -> Iterator[None]:
        """Context manager: time that is not work of this rank's stages counts as blocked."""
        began, work = clock.monotonic() - BLOCKED(), sum(stage.work_s for stage in self._stages)
        yield
        work = sum(stage.work_s for stage in self._stages) - work
        BLOCKED.add(clock.monotonic() - BLOCKED() - began - work)

    @property
    def tied(self) -> nn.Parameter | None:
        """Learned parameter of the tied matrix of the first and last stage; None if this rank has neither."""
        for stage in {0, self._last} & self._views.keys():
            if _is_tied(view := self._views[stage]):
                parts = cast(nn.Module, view.embed).parameters()  # the matrix, or its new rows
                return next((part for part in parts if part.requires_grad), None)
        return None

    @torch.no_grad()
    def sum_tied(self) -> None:
        """Add the other stage's gradient of the tied matrix; addition commutes, so both sums are equal.

        Call after a step, once gradients are reduced, on every rank.
        """
        if self.tied is None:
            return
        mine = local(cast(Tensor, self.tied.grad))
        other, peer = torch.empty_like(mine), self._ranks - 1 if 0 in self._views else 0
        both = [
            dist.P2POp(dist.isend, mine.contiguous(), group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
        ]
        with waiting():
            for work in dist.batch_isend_irecv(both):
                work.wait()
        mine += other
        self._sent_before += mine.nbytes

    @torch.no_grad()
    def forward(self, input_ids: Tensor, **others: Any) -> Tensor:
        """Run a forward pass through all stages; return the `finish` result, or 0, as in `step`."""
        out = input_ids.new_zeros((), dtype=torch.float32)
        for stage, view in self._views.items():
            x = input_ids
            if stage > 0:
                x = self._hidden(input_ids, input_ids.device)
                dist.recv(x, group=self._group, group_src=(stage - 1) % self._ranks)
            y: Tensor = view(x, **others)
            if stage < self._last:
                dist.send(y.contiguous(), group=self._group, group_dst=(stage + 1) % self._ranks)
            else:
                out = y
        return out

    def _inputs(self, part: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        others = {name: value for name, value in part.items() if name != "input_ids"}
        return (part["input_ids"],) if 0 in self._views else (), others

    def _schedule(self, parts: Sequence[Inputs]) -> "_OneByOne | _Interleaved":
        ids = parts[0]["input_ids"]
        key = len(parts), ids.shape
        if self._made is None or self._made[0] != key:  # shapes change only by planned changes
            self._sent_before = self.sent_bytes
            self._stages = stages = [self._stage(number, view, ids) for number, view in self._views.items()]
            how: Any = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
            if len(stages) == 1:
                self._made = key, _OneByOne(stages[0], len(parts), **how)
            else:
                self._made = key, _Interleaved([*stages], len(parts), **how)
        return self._made[1]

    def _stage(self, stage: int, view: nn.Module, ids: Tensor) -> CountedStage:
        between = self._hidden(ids, "meta").requires_grad_()
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        return CountedStage(
            view,
            stage,
            self._last + 1,
            ids.device,
            input_args=between if stage else ids.to("meta"),
            output_args=between if stage < self._last else loss,
            group=self._group,
        )

    def _hidden(self, ids: Tensor, device: torch.device | str) -> Tensor:
        """Return a buffer for hidden states of tokens [batch, seq], in the format between stages."""
        batch, length = ids.shape
        size = cast(Any, next(iter(self._views.values()))).config.hidden_size
        return torch.empty(batch, length // self._slices, size, dtype=self._dtype, device=device)


StageInputs = list[tuple[tuple[Tensor, ...], dict[str, Any]]]
"""Positional and named arguments of each micro-batch, split by us, because documents differ in length."""


class _OneByOne(Schedule1F1B):
    parts: StageInputs

    def _split_inputs(self, *_: Any) -> tuple[list[tuple[Tensor, ...]], list[dict[str, Any]]]:
        return [args for args, _ in self.parts], [kwargs for _, kwargs in self.parts]


class _Interleaved(ScheduleInterleaved1F1B):
    parts: StageInputs

    def _split_inputs(self, *_: Any) -> tuple[list[tuple[Tensor, ...]], list[dict[str, Any]]]:
        return [args for args, _ in self.parts], [kwargs for _, kwargs in self.parts]
