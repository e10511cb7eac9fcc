"""Learned rows of a grown vocabulary, over an embedding and an output matrix that are frozen.

    rows of the matrix    0 ... old - 1        old ... vocab - 1
    from                  weight (frozen)      new_rows (learned)

An adapter freezes the matrices with a row per token id. Tokens that the model lacked would stay what all new
rows begin as, the mean of the old ones; so these rows are a parameter of their own, `embed.new_rows`, beside
the frozen `embed.weight`, whose last rows are then unused.

As an output matrix the two are joined in each forward pass: a copy of the matrix in the dtype of compute, and
the loss computes a gradient of the whole, of which the new rows' part is kept.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

NEW_ROWS = "new_rows"
"""Name of the parameter in its module."""


class EmbeddingWithNewRows(nn.Embedding):
    """Embedding whose last rows are learned; made by `add_new_rows`."""

    new_rows: nn.Parameter

    def forward(self, ids: Int[Tensor, "batch seq"]) -> Float[Tensor, "batch seq hidden"]:
        """Look up token ids."""
        return look_up(ids, self.weight, self.new_rows, first=self.num_embeddings - len(self.new_rows))

    def rows(self) -> Float[Tensor, "vocab hidden"]:
        """Return the matrix."""
        return joined(self.weight, self.new_rows, known=self.num_embeddings - len(self.new_rows))


class OutputWithNewRows(nn.Linear):
    """Output matrix whose last rows are learned; made by `add_new_rows`."""

    new_rows: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, [..., vocab]."""
        return functional.linear(x, self.rows())

    def rows(self) -> Float[Tensor, "vocab hidden"]:
        """Return the matrix."""
        return joined(self.weight, self.new_rows, known=self.out_features - len(self.new_rows))


def add_new_rows(matrix: nn.Module, num_rows: int, *, dtype: torch.dtype) -> None:
    """Let the last rows of a frozen embedding or output matrix be learned, in place; they have no values yet.

    Args:
        dtype: dtype of the rows.
    """
    assert isinstance(matrix, nn.Embedding | nn.Linear), type(matrix)
    matrix.__class__ = EmbeddingWithNewRows if isinstance(matrix, nn.Embedding) else OutputWithNewRows
    shape = num_rows, matrix.weight.shape[1]
    empty = torch.empty(shape, dtype=dtype, device=matrix.weight.device)
    matrix.register_parameter(NEW_ROWS, nn.Parameter(empty))


def look_up(ids: Tensor, weight: Tensor, new_rows: Tensor, *, first: int) -> Tensor:
    """Return the rows of token ids, [..., hidden].

    Args:
        weight: rows of ids from 0 to `first`, at least.
        first: id of the first of `new_rows`.
    """
    is_new = ids >= first
    old = functional.embedding(ids.where(~is_new, 0), weight)
    new = functional.embedding((ids - first).where(is_new, 0), new_rows)
    return torch.where(is_new[..., None], new, old)


def joined(weight: Tensor, new_rows: Tensor, *, known: int) -> Tensor:
    """Return the first `known` rows of a matrix, and then the new rows.

    >>> joined(torch.zeros(3, 1), torch.ones(2, 1), known=1).flatten()
    tensor([0., 1., 1.])
    """
    return torch.cat([weight[:known], new_rows])


def rows_of(matrix: nn.Module) -> Tensor:
    """Return the rows of an embedding or output matrix, the learned ones in their place."""
    if isinstance(matrix, EmbeddingWithNewRows | OutputWithNewRows):
        return matrix.rows()
    weight: Tensor = matrix.weight  # type: ignore[assignment]  # not a module
    return weight


def is_new_rows(name: str) -> bool:
    """Return True if a parameter's name is that of new rows.

    >>> is_new_rows("embed.new_rows"), is_new_rows("embed.weight")
    (True, False)
    """
    return name.rpartition(".")[2] == NEW_ROWS


def matrix_named(name: str) -> str:
    """Return the name of the matrix of new rows.

    >>> matrix_named("unembed.new_rows")
    'unembed.weight'
    """
    return f"{name.removesuffix(NEW_ROWS)}weight"


@torch.no_grad()
def put_new_rows(weights: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Write the new rows among some tensors into the matrices that they belong to.

    Args:
        weights: whole matrices, by name.
        tensors: whole parameters, by name; others than new rows are ignored.
    """
    for name, rows in tensors.items():
        if is_new_rows(name):
            weights[matrix_named(name)][-len(rows) :] = rows.to(weights[matrix_named(name)])
