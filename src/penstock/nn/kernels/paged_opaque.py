"""Paged attention as one operator that hides the pages from the compiler: it writes keys and attends.

A compiler turns writes to a caller's memory into copies; of pages it copied all of them, once a layer. So the
pages are not arguments of this operator, and neither is the `PagedStep`: it finds both in the context of the
thread that runs the program. It reads what it writes in the same call, so the compiler has no order to keep.

A compiled program therefore depends on the number of tokens alone: not on shares, lengths or tables, not on
the memory of the pages, and not on the layer, whose index is a tensor on the host. One program computes all
blocks of the same shape.

Legend as in paged.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from penstock.nn.kernels.paged import LayerPages, Paged

_LAYERS: ContextVar[Sequence[LayerPages]] = ContextVar("the pages of each layer, bound to a step")


@contextmanager
def pages_in_use(layers: Sequence[LayerPages]) -> Iterator[None]:
    """Make pages available to the compiled programs that this thread runs inside the context."""
    token = _LAYERS.set(layers)
    try:
        yield
    finally:
        _LAYERS.reset(token)


@dataclass(frozen=True, slots=True)
class HiddenPages:
    """Placeholder of a layer's pages in a compiled program."""

    index: Int64[Tensor, ""]
    """Index of the layer; on the host, where reading it does not wait for the device."""
    window: int | None
    """As in `Paged`."""

    def append(self, k_bkld: Tensor, v_bkld: Tensor) -> tuple[Tensor, Tensor]:
        """Return the arguments unchanged: `attend` writes them."""
        return k_bkld, v_bkld

    def attend(
        self,
        q_bhld: Tensor,
        k_bkld: Tensor,
        v_bkld: Tensor,
        *,
        scale: float,
        sinks: Tensor | None = None,
        softcap: float | None = None,
    ) -> Float[Tensor, "1 t h_times_d"]:
        """Write the step's keys and values, each [1, k, t, d], and attend with its queries, [1, h, t, d].

        Tokens beyond the step's own are padding: none of their keys is written, and their results are zeros.
        """
        out: Tensor = torch.ops.penstock.attend_hidden(
            q_bhld, k_bkld, v_bkld, self.index, self.window or 0, scale, sinks, softcap or 0.0
        )
        return out


def _attend_hidden(
    q_bhld: Tensor,
    k_bkld: Tensor,
    v_bkld: Tensor,
    layer: Tensor,
    window: int,
    scale: float,
    sinks: Tensor | None,
    softcap: float,
) -> Tensor:
    pages = _LAYERS.get()[int(layer)]
    _, heads, num_tokens, head_dim = q_bhld.shape
    count = len(pages.step.slots)
    attend = partial(
        Paged(pages.step, window or None).attend, scale=scale, sinks=sinks, softcap=softcap or None
    )
    if count == num_tokens:
        pages.append(k_bkld, v_bkld)
        q_thd = q_bhld[0].transpose(0, 1).contiguous()
        return attend(q_thd, pages.keys, pages.values).flatten(1)[None]
    out = q_bhld.new_zeros(num_tokens, heads, head_dim)
    if count:
        pages.append(k_bkld[:, :, :count], v_bkld[:, :, :count])
        q_thd = q_bhld[0, :, :count].transpose(0, 1).contiguous()
        out[:count] = attend(q_thd, pages.keys, pages.values)
    return out.flatten(1)[None]


def _shape(q_bhld: Tensor, *_: object) -> Tensor:
    batch, heads, num_tokens, head_dim = q_bhld.shape
    return q_bhld.new_empty(batch, num_tokens, heads * head_dim)


torch.library.define(
    "penstock::attend_hidden",
    "(Tensor q, Tensor k, Tensor v, Tensor layer, int window, float scale, Tensor? sinks, float softcap) "
    "-> Tensor",
)
torch.library.impl("penstock::attend_hidden", "CompositeExplicitAutograd", _attend_hidden)
torch.library.register_fake("penstock::attend_hidden", _shape)
