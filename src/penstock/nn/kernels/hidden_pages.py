"""Attention over pages that a compiled program does not see: one operator writes a step's keys and attends.

A compiler that sees a program write to memory of its caller rewrites it to write nothing in place, and copies
afterwards; of pages it copied all of them, once a layer. So they are no argument here, and neither is whose
the tokens are: the operator finds both in the context of the thread that runs the program. What it writes
it also reads, in one call, so nothing is left for a compiler to put in order.

So a program depends on the number of tokens alone: not on shares, lengths or tables, not on the memory of
the pages, and not on the layer, whose index is a tensor on the host: one program computes all blocks that
are alike.

Legend as in paged.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from penstock.nn.kernels.paged import LayerPages, Paged

_LAYERS: ContextVar[Sequence[LayerPages]] = ContextVar("the pages of each layer, bound to a step")


@contextmanager
def pages_in_use(layers: Sequence[LayerPages]) -> Iterator[None]:
    """Let the programs that this thread runs meanwhile find these pages."""
    token = _LAYERS.set(layers)
    try:
        yield
    finally:
        _LAYERS.reset(token)


@dataclass(frozen=True, slots=True)
class HiddenPages:
    """What stands for a layer's pages in a program."""

    index: Int64[Tensor, ""]
    """Of the layer; on the host, where reading it waits for nothing."""
    window: int | None
    """As in `Paged`."""

    def append(self, k_bkld: Tensor, v_bkld: Tensor) -> tuple[Tensor, Tensor]:
        """Return them: they are written by `attend`."""
        return k_bkld, v_bkld

    def attend(
        self, q_bhld: Tensor, k_bkld: Tensor, v_bkld: Tensor, *, scale: float
    ) -> Float[Tensor, "1 t h_times_d"]:
        """Write the step's keys and values, each [1, k, t, d], and attend with its queries, [1, h, t, d].

        Tokens beyond the step's own fill a program up: nothing is written of them, and zeros returned.
        """
        out: Tensor = torch.ops.penstock.attend_hidden(
            q_bhld, k_bkld, v_bkld, self.index, self.window or 0, scale
        )
        return out


def _attend_hidden(
    q_bhld: Tensor, k_bkld: Tensor, v_bkld: Tensor, layer: Tensor, window: int, scale: float
) -> Tensor:
    pages = _LAYERS.get()[int(layer)]
    _, heads, num_tokens, head_dim = q_bhld.shape
    count = len(pages.step.slots)
    out = q_bhld.new_zeros(num_tokens, heads, head_dim)
    if count:
        pages.append(k_bkld[:, :, :count], v_bkld[:, :, :count])
        q_thd = q_bhld[0, :, :count].transpose(0, 1).contiguous()
        out[:count] = Paged(pages.step, window or None).attend(q_thd, pages.keys, pages.values, scale=scale)
    return out.flatten(1)[None]


def _shape(q_bhld: Tensor, *_: object) -> Tensor:
    batch, heads, num_tokens, head_dim = q_bhld.shape
    return q_bhld.new_empty(batch, num_tokens, heads * head_dim)


torch.library.define(
    "penstock::attend_hidden",
    "(Tensor q, Tensor k, Tensor v, Tensor layer, int window, float scale) -> Tensor",
)
torch.library.impl("penstock::attend_hidden", "CompositeExplicitAutograd", _attend_hidden)
torch.library.register_fake("penstock::attend_hidden", _shape)
