"""Context parallelism: each rank of an axis holds a sequence slice of every row; attention sees whole rows.

Everything else in a decoder is per token. Attention gets the rest of the row in one of two ways:

    all_gather   keys and values of all slices are gathered; this rank's queries attend to those up to theirs.
                 Any number of heads; sends 2 x key-value heads per token (as in Llama 3, arXiv:2407.21783).
    ulysses      heads are exchanged for tokens, so a rank attends over whole rows with some heads, and the
                 result is exchanged back (Jacobs et al., DeepSpeed-Ulysses, arXiv:2309.14509). Sends each
                 query, key, value and output once; works with the unchanged fast kernels.

Rows hold documents, and a token attends within its own: `cu_seqlens` is that of whole rows on every rank.
Slices are equal and in order, so with all_gather the last rank computes most.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.nn.attention import Attend, given_sinks, given_softcap
from penstock.nn.kernels.layout import AttentionLayout, starts_of
from penstock.nn.kernels.sdpa import Masked
from penstock.nn.kernels.softcap import with_softcap
from penstock.parallel.collectives import CollectiveGroup, exchange, gather, group_of
from penstock.parallel.layout import ContextRule

Choose = Callable[..., Attend]
"""Signature of `choose_kernel`."""


def spread_context(model: nn.Module, mesh: DeviceMesh, *, rule: ContextRule) -> None:
    """Make a model attend over whole rows from sequence slices, in place.

    Its forward then takes this rank's slice of `input_ids` and `position_ids`, and the `cu_seqlens` of whole
    rows.

    Args:
        model: has `choose`.
        mesh: one axis; slices are in the order of its ranks.
    """
    choose = cast(Choose, model.choose)
    index, group = mesh.get_local_rank(), group_of(mesh)

    def choose_gathered(
        layout: AttentionLayout, *, device: torch.device, has_softcap: bool = False, **_: Any
    ) -> Attend:
        first, past = layout.seq_len * index, layout.seq_len * (index + 1)
        whole = _whole(layout, group.size)
        if has_softcap:
            capped = with_softcap(whole, first=first, past=past)
            return GatheredContext(cast(Attend, capped), past, group)
        return GatheredContext(Masked(stretch_mask(whole, first, past, device=device)), past, group)

    def choose_exchanged(layout: AttentionLayout, **of: Any) -> Attend:  # Any: device, dtype, head_dim
        return UlyssesContext(choose(_whole(layout, group.size), **of), group, index)

    model.choose = choose_exchanged if rule == "ulysses" else choose_gathered  # type: ignore[assignment]


def _whole(layout: AttentionLayout, size: int) -> AttentionLayout:
    return replace(layout, seq_len=layout.seq_len * size)


@dataclass(frozen=True, slots=True)
class GatheredContext:
    """Attention of one slice's queries over gathered keys and values, up to this slice."""

    attend: Attend
    """Attention of this slice's queries over the keys before `past`."""
    past: int
    """End of this slice in a row."""
    group: CollectiveGroup

    def __call__(
        self,
        q_bhld: Tensor,
        k_bksd: Tensor,
        v_bksd: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Compute attention."""
        both = gather(torch.cat((k_bksd, v_bksd), 1), dim=2, group=self.group)  # one message, not two
        k, v = both[:, :, : self.past].chunk(2, 1)
        return self.attend(q_bhld, k, v, scale=scale, **given_sinks(sinks), **given_softcap(softcap))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class UlyssesContext:
    """Attention of some heads over whole rows."""

    attend: Attend
    group: CollectiveGroup
    index: int
    """Rank within the group; the heads are dealt out in the order of ranks."""

    def __call__(
        self,
        q_bhld: Tensor,
        k_bksd: Tensor,
        v_bksd: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Compute attention."""
        heads = k_bksd.shape[1]
        copies = self.group.size // math.gcd(self.group.size, heads)  # repeats that make heads divisible
        k, v = (t.repeat_interleave(copies, 1) if copies > 1 else t for t in (k_bksd, v_bksd))
        q, k, v = (exchange(t, split=1, join=2, group=self.group) for t in (q_bhld, k, v))
        own = None if sinks is None else sinks.chunk(self.group.size)[self.index]
        mixed = self.attend(q, k, v, scale=scale, **given_sinks(own), **given_softcap(softcap))  # type: ignore[arg-type]
        return exchange(mixed, split=2, join=1, group=self.group)


def stretch_mask(
    whole: AttentionLayout, first: int, past: int, *, device: torch.device
) -> Bool[Tensor, "batch_or_1 1 queries past"]:
    """Return the mask of keys before `past` for the queries from `first` to `past` of each row."""
    keys = torch.arange(past, device=device)
    queries = keys[first:, None]
    mask = keys <= queries
    if whole.window is not None:
        mask = mask & (keys > queries - whole.window)
    if whole.cu_seqlens is None:
        return mask[None, None]
    start = starts_of(whole.cu_seqlens.to(device), whole.batch * whole.seq_len)
    start = start.view(whole.batch, 1, whole.seq_len)[..., :past]
    return (mask & (start[..., first:].transpose(1, 2) == start))[:, None]
