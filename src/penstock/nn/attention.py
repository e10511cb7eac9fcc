"""Grouped-query attention; the attention kernel is an argument that also decides visibility.

The model prepares one `Attend` per forward pass, outside the blocks, and every layer shares it. A mask or a
document table is built once, and the code of a block has no branch on the data.
Legend of suffixes: b batch, l queries, s keys, h query heads, k key-value heads, d head dim, c hidden.
"""

from collections.abc import Collection, Mapping
from typing import Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn

from penstock.nn.dtensor import local
from penstock.nn.kinds import BIAS, ParameterKind
from penstock.nn.norm import RMSNorm, mean_square_of
from penstock.nn.rope import rotate

Rope = tuple[Tensor, ...]
"""Cosines and sines, each [batch, seq, 1, head_dim], and where queries are scaled by their position, factors
[batch, seq, 1, 1]."""


class Attend(Protocol):
    """Softmax attention with its visibility rule already bound; h is a multiple of k."""

    def __call__(
        self, q_bhld: Tensor, k_bksd: Tensor, v_bksd: Tensor, *, scale: float, sinks: Tensor | None = None
    ) -> Tensor:
        """Return [b, h, l, d] for l queries over s keys.

        Args:
            sinks: [h], scores that take part in the softmax of each query and have no value
                (nn/kernels/sinks.py). Given only by layers that have them: kernels without sinks lack the
                argument.

        A layer with a softcap gives it as `softcap`; a kernel without one lacks that argument too.
        """
        ...


class LayerCache(Protocol):
    """Keys and values of one layer, kept between forward passes."""

    def append(self, k_bkld: Tensor, v_bkld: Tensor) -> tuple[Tensor, Tensor]:
        """Append l positions; return all keys and values, in the layout that the cache's own `Attend`
        reads."""
        ...


class MeanSquares(Protocol):
    """Mean squares of vectors that are spread over ranks."""

    def __call__(self, means: Float[Tensor, "... 2"]) -> Float[Tensor, "... 2"]:
        """Return the mean squares of the whole queries and keys, from those of this rank's part."""
        ...


class GroupedQueryAttention(nn.Module):
    """Attention in which groups of query heads share one key-value head (arXiv:2305.13245).

    Args:
        scale: factor on the scores before the softmax.
        softcap: cap on the scaled scores (nn/softcap.py); None: there is none.
        biases: projections that have a bias: any of query, key, value and output.
        qk_norm: whether queries and keys are normalised before the rotation (Henry et al., arXiv:2010.04245):
            "head": each head by itself (Qwen 3); "whole": all heads together (OLMo 2); "rotated": each head,
            after the rotation (HunYuan).
        norm_eps: epsilon of these norms.
        has_zero_centered_norms: their weights are stored less 1.
        has_sinks: whether each query head has an attention sink (nn/kernels/sinks.py).
    """

    mean_squares: MeanSquares | None = None
    """Joins the ranks that share the heads of norms of all heads; None: this rank has all heads."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_key_value_heads: int,
        head_dim: int,
        scale: float,
        softcap: float | None = None,
        biases: Collection[str] = (),
        qk_norm: Literal["head", "whole", "rotated"] | None = None,
        norm_eps: float = 1e-6,
        has_zero_centered_norms: bool = False,
        has_sinks: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.scale = scale
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if has_sinks else None
        self.softcap = softcap
        self.query = nn.Linear(hidden_size, num_heads * head_dim, bias="query" in biases)
        self.key = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias="key" in biases)
        self.value = nn.Linear(hidden_size, num_key_value_heads * head_dim, bias="value" in biases)
        self.output = nn.Linear(num_heads * head_dim, hidden_size, bias="output" in biases)
        self.qk_norm = qk_norm

        def norm(heads: int) -> RMSNorm | None:
            size = heads * head_dim if qk_norm == "whole" else head_dim
            made = RMSNorm(size, eps=norm_eps, is_zero_centered=has_zero_centered_norms)
            return None if qk_norm is None else made

        self.query_norm = norm(num_heads)
        self.key_norm = norm(num_key_value_heads)

    def kinds(self) -> Mapping[str, ParameterKind]:
        """Return the kinds of the parameters."""
        return {"sinks": BIAS}

    def forward(
        self,
        x_blc: Float[Tensor, "batch seq hidden"],
        rope: Rope,
        attend: Attend,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Mix tokens of the rows; with a cache, also with the positions already in it."""
        heads = (*x_blc.shape[:-1], -1, self.head_dim)
        q, k = self.query(x_blc), self.key(x_blc)
        if self.qk_norm == "whole":
            q, k = normalise_whole(self, q, k)
        q_blhd, k_blkd = q.view(heads), k.view(heads)
        if self.qk_norm == "head":
            q_blhd, k_blkd = normalise_heads(self, q_blhd, k_blkd)
        q_blhd, k_blkd = rotated(q_blhd, k_blkd, rope)
        if self.qk_norm == "rotated":
            q_blhd, k_blkd = normalise_heads(self, q_blhd, k_blkd)
        v_blkd = self.value(x_blc).view(heads)
        q_bhld, k_bkld, v_bkld = (part.transpose(1, 2) for part in (q_blhd, k_blkd, v_blkd))
        if cache is not None:
            k_bkld, v_bkld = cache.append(k_bkld, v_bkld)
        sinks, softcap = given_sinks(self.sinks), given_softcap(self.softcap)
        o_bhld = attend(q_bhld, k_bkld, v_bkld, scale=self.scale, **sinks, **softcap)  # type: ignore[arg-type]
        out: Tensor = self.output(o_bhld.transpose(1, 2).flatten(2))
        return out


def given_sinks(sinks: Tensor | None) -> dict[str, Tensor]:
    """Return the argument of `Attend` for a layer's sinks, this rank's part of them; none for None."""
    return {} if sinks is None else {"sinks": local(sinks)}


def given_softcap(softcap: float | None) -> dict[str, float]:
    """Return the keyword of an `Attend` for a layer's softcap; nothing without one."""
    return {} if softcap is None else {"softcap": softcap}


def parts_of(rope: Rope) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return cosines, sines, and the factors on queries; None: queries are not scaled."""
    cosines, sines, *scales = rope
    return cosines, sines, scales[0] if scales else None


def rotated(q_blhd: Tensor, k_blkd: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys, and scale the queries.

    Both stay in the layout of the linear layers. If they were rotated after the transposition, the compiler
    would copy each gradient back to it.
    """
    cosines, sines, scales = parts_of(rope)
    q_blhd, k_blkd = rotate(q_blhd, cosines, sines), rotate(k_blkd, cosines, sines)
    return (q_blhd if scales is None else q_blhd * scales), k_blkd


class HasHeadNorms(Protocol):
    """Attention whose queries and keys are normalised."""

    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    mean_squares: MeanSquares | None


def normalise_heads(
    of: HasHeadNorms, q: Float[Tensor, "... heads dim"], k: Float[Tensor, "... kv_heads dim"]
) -> tuple[Tensor, Tensor]:
    """Normalise each head of queries and keys by itself."""
    assert of.query_norm is not None, of
    assert of.key_norm is not None, of
    return of.query_norm(q), of.key_norm(k)


def normalise_whole(
    of: HasHeadNorms, q: Float[Tensor, "... heads_dim"], k: Float[Tensor, "... kv_heads_dim"]
) -> tuple[Tensor, Tensor]:
    """Normalise the queries of a token over all heads, and the keys; with one sum over ranks if they are
    spread."""
    if of.mean_squares is None:
        return normalise_heads(of, q, k)
    assert of.query_norm is not None, of
    assert of.key_norm is not None, of
    found = of.mean_squares(torch.cat([mean_square_of(q), mean_square_of(k)], dim=-1))
    return of.query_norm.normalise_part(q, found[..., :1]), of.key_norm.normalise_part(k, found[..., 1:])
