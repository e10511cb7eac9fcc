"""Grouped-query attention; who sees whom is decided by the callable handed to it.

The model prepares one `Attend` per forward pass, outside the blocks, and every layer shares it: a
mask or a document table is built once, and the block's own code has no branch on the data.
Legend of suffixes: b batch, l queries, s keys, h query heads, k key-value heads, d head dim, c hidden.
"""

from typing import Protocol

from jaxtyping import Float
from torch import Tensor, nn

from penstock.nn.rope import rotate

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, each [batch, 1, seq, head_dim]."""


class Attend(Protocol):
    """Softmax attention with its visibility rule already bound; h is a multiple of k."""

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Return [b, h, l, d] for l queries over s keys."""
        ...


class LayerCache(Protocol):
    """Keys and values of one layer, in the order of their positions."""

    def append(self, k_bkld: Tensor, v_bkld: Tensor) -> tuple[Tensor, Tensor]:
        """Add l positions; return all keys and values so far, each [b, k, s, d]."""
        ...


class GroupedQueryAttention(nn.Module):
    """Attention in which groups of query heads share one key-value head (arXiv:2305.13245).

    Args:
        scale: factor on the scores before the softmax.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int,
        head_dim: int,
        scale: float,
        bias: bool,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.query = nn.Linear(hidden_size, num_heads * head_dim, bias=bias)
        self.key = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.value = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias=bias)
        self.output = nn.Linear(num_heads * head_dim, hidden_size, bias=bias)

    def forward(
        self,
        x_blc: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Mix tokens; with a cache, `x` follows the positions already in it."""
        heads = (*x_blc.shape[:-1], -1, self.head_dim)
        q_bhld = rotate(self.query(x_blc).view(heads).transpose(1, 2), *rope)
        k_bkld = rotate(self.key(x_blc).view(heads).transpose(1, 2), *rope)
        v_bkld = self.value(x_blc).view(heads).transpose(1, 2)
        if cache is not None:
            k_bkld, v_bkld = cache.append(k_bkld, v_bkld)
        o_bhld = attend(q_bhld, k_bkld, v_bkld, scale=self.scale)
        out: Tensor = self.output(o_bhld.transpose(1, 2).flatten(2))
        return out
