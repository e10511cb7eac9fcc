"""Private names of torch's FSDP2 that Penstock uses, all in this file, checked once.

FSDP2's public interface gives neither the bytes that a unit gathers nor its gradients in progress, makes
gathers asynchronous on CPUs only through a private method, and cannot delegate the reduction between
replicas. Everything else uses its public interface.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from penstock.core.errors import PenstockError

try:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
except ImportError as error:  # pragma: no cover - another torch
    raise PenstockError(
        f"FSDP2 of torch {torch.__version__} has other private names: {error}",
        fix="Install a torch from 2.11 to 2.13.",
    ) from None

__all__ = ["DefaultAllGather", "DefaultReduceScatter", "FsdpUnit", "units_of"]

_OF_GROUPS = (
    "fsdp_params", "mesh_info", "post_forward_mesh_info", "reduce_grads", "reshard_after_backward",
    "unshard_async_op", "_all_gather_comm", "_all_reduce_hook", "_reduce_scatter_comm",
)  # fmt: skip


class FsdpUnit:
    """A module that FSDP2 gathers and frees as one.

    Raises:
        PenstockError: the installed FSDP2 has other private names.
    """

    def __init__(self, module: FSDPModule, *, is_root: bool) -> None:
        self.module = module
        self.is_root = is_root
        groups = getattr(module._get_fsdp_state(), "_fsdp_param_groups", [])
        missing = [name for name in _OF_GROUPS if groups and not hasattr(groups[0], name)]
        if len(groups) > 1 or missing or not hasattr(module, "_set_unshard_async_op"):
            raise PenstockError(
                f"FSDP2 of torch {torch.__version__} lacks attributes that ethernet.overlap needs",
                got=", ".join(missing) or f"{len(groups)} groups of parameters",
                fix="Install a torch from 2.11 to 2.13, or set ethernet.overlap = false.",
            )
        self._group: Any = groups[0] if groups else None  # Any: FSDPParamGroup, private
        self._after_forward: Any = None  # Any: a mesh, as FSDP2 describes it

    @property
    def has_parameters(self) -> bool:
        """True if the unit has parameters."""
        return self._group is not None

    @property
    def num_gathered(self) -> int:
        """Numbers per gather, with FSDP2's padding, so equal on all ranks."""
        return self._num_whole(self._group.fsdp_params)

    @property
    def num_reduced(self) -> int:
        """Numbers per reduction, likewise: those that are learned."""
        return self._num_whole(self._learned)

    def _num_whole(self, parameters: list[Any]) -> int:
        sizes = [p.padded_sharded_param_size.numel() for p in parameters]
        return int(sum(sizes) * self._group.mesh_info.shard_mesh_size)

    @property
    def _learned(self) -> list[Any]:  # Any: FSDPParam, private
        return [p for p in self._group.fsdp_params if p.sharded_param.requires_grad]

    @property
    def waits_in_gathers(self) -> bool:
        """True if it is gathered by FSDP2's own collective, which blocks on CPUs."""
        return type(self._group._all_gather_comm) is DefaultAllGather

    @property
    def waits_in_reductions(self) -> bool:
        """True if it is reduced by FSDP2's own collectives, over shards and replicas."""
        own = getattr(self._group._reduce_scatter_comm, "counts_waits", False)
        return not own and self._group._all_reduce_hook is None

    @property
    def is_float32(self) -> bool:
        """True if its learned parameters, and so their gradients, are float32."""
        return all(p.sharded_param.dtype == torch.float32 for p in self._learned)

    @property
    def gathers_near(self) -> bool:
        """True if the backward pass gathers over fewer ranks than the forward pass."""
        after = self._group.post_forward_mesh_info
        return after is not None and after is not self._group.mesh_info

    @property
    def stays_between(self) -> bool:
        """True if it stays gathered between forward and backward pass, as the root does."""
        return self.is_root or self._group.post_forward_mesh_info is None

    @property
    def gradient(self) -> Tensor | None:
        """First of its reduced gradients as a plain tensor; None before the first reduction."""
        grad = next((p.sharded_param.grad for p in self._learned), None)
        return None if grad is None else grad._local_tensor

    def add_up(self) -> None:
        """Accumulate the gradients computed since the last call, in float32 if they are computed in fewer
        bits; as FSDP2 does after a backward pass without a reduction.
        """
        for parameter in self._group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()

    def gather_behind(self) -> None:
        """Make its gathers asynchronous: they are waited for when their result is used."""
        self.module._set_unshard_async_op(True)

    def leave_copies_alone(self) -> None:
        """Reduce within a shard group only; the caller reduces between replicas."""
        info = self._group.mesh_info
        if isinstance(info, HSDPMeshInfo):
            near = FSDPMeshInfo(mesh=info.mesh, shard_mesh_dim=info.shard_mesh_dim)
            self._group.mesh_info = near
            if self._group.post_forward_mesh_info is info:
                self._group.post_forward_mesh_info = near

    def stay(self, *, after_forward: bool, after_backward: bool, reduce: bool) -> None:
        """Set when it stays gathered, and whether the next backward pass reduces its gradients."""
        group = self._group
        if not self.stays_between:
            self._after_forward = group.post_forward_mesh_info
        if not self.is_root:
            group.post_forward_mesh_info = None if after_forward else self._after_forward
        group.reshard_after_backward = not after_backward
        group.reduce_grads = reduce


def units_of(model: nn.Module) -> list[FsdpUnit]:
    """Return the units of a sharded model, the root first, then in order of use."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    units = [FsdpUnit(module, is_root=module is model) for module in modules]
    return [unit for unit in units if unit.has_parameters]
