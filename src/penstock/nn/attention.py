"""Grouped-query attention; the attention kernel is an argument that also decides visibility.

The model prepares one `Attend` per forward pass, outside the blocks, and every layer shares it. A mask or a
document table is built once, and the code of a block has no branch on the data.
Legend of suffixes: b batch, l queries, s keys, h query heads, k key-value heads, d head dim, c hidden.
"""

from collections.abc import Collection
from typing import Protocol

from jaxtyping import Float
from torch import Tensor, nn

from penstock.nn.norm import RMSNorm
from penstock.nn.rope import rotate

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, each [batch, 1, seq, head_dim]."""


class Attend(Protocol):
    """Softmax attention with its visibility rule already bound; h is a multiple of k."""

    def __call__(self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float) -> Tensor:
        """Return [b, h, l, d] for l queries over s keys."""
        ...


class LayerCache(Protocol):
    """Keys and values of one layer, kept between forward passes."""

    def append(self, k_bkld: Tensor, v_bkld: Tensor) -> tuple[Tensor, Tensor]:
        """Append l positions; return all keys and values, in the layout that the cache's own `Attend`
        reads."""
        ...


class GroupedQueryAttention(nn.Module):
    """Attention in which groups of query heads share one key-value head (arXiv:2305.13245).

    Args:
        scale: factor on the scores before the softmax.
            biases: projections that have a bias: any of query, key, value and output.
            norm_eps: epsilon of the norm of each head's query and key, before the rotation
                (Henry et al., arXiv:2010.04245; with RMSNorm as in Qwen 3). None: no such norm.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int,
        head_dim: int,
        scale: float,
        biases: Collection[str] = (),
        norm_eps: float | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.query = nn.Linear(hidden_size, num_heads * head_dim, bias="query" in biases)
        self.key = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias="key" in biases)
        self.value = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias="value" in biases)
        self.output = nn.Linear(num_heads * head_dim, hidden_size, bias="output" in biases)
        self.query_norm = None if norm_eps is None else RMSNorm(head_dim, eps=norm_eps)
        self.key_norm = None if norm_eps is None else RMSNorm(head_dim, eps=norm_eps)

    def forward(
        self,
        x_blc: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Mix tokens of the rows; with a cache, also with the positions already in it."""
        heads = (*x_blc.shape[:-1], -1, self.head_dim)
        q_blhd, k_blkd = self.query(x_blc).view(heads), self.key(x_blc).view(heads)
        if self.query_norm is not None and self.key_norm is not None:
            q_blhd, k_blkd = self.query_norm(q_blhd), self.key_norm(k_blkd)
        q_bhld, k_bkld = (rotate(t.transpose(1, 2), *rope) for t in (q_blhd, k_blkd))
        v_bkld = self.value(x_blc).view(heads).transpose(1, 2)
        if cache is not None:
            k_bkld, v_bkld = cache.append(k_bkld, v_bkld)
        o_bhld = attend(q_bhld, k_bkld, v_bkld, scale=self.scale)
        out: Tensor = self.output(o_bhld.transpose(1, 2).flatten(2))
        return out
