"""What heads learn from: rows of tokens and the model's hidden states over them.

Legend: b rows, l tokens, t positions that all heads have a token for, n heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from penstock.data.types import IGNORED_LABEL
from penstock.models.speculator import Speculator
from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Rows, and where in them a head may look ahead."""

    hidden: Float[Tensor, "b l hidden"]
    """The model's normalised residual stream, float32, without a graph."""
    labels: Int[Tensor, "b l"]
    """The token after each."""
    documents: Int[Tensor, "b l"]
    """Which document each token is of: no head looks over its end."""
    first: int = 0
    """Positions before this one are context only."""

    def per_head(
        self, num_heads: int
    ) -> Iterator[tuple[Int[Tensor, "b t"], Int[Tensor, "b t"], Bool[Tensor, "b t"]]]:
        """Yield for each head the tokens it is given, those it should guess, and where it counts."""
        last = self.labels.shape[1] - num_heads
        start = self.documents[:, self.first : last]
        for head in range(num_heads):
            given = self.labels[:, self.first + head : last + head]
            wanted = self.labels[:, self.first + head + 1 : last + head + 1]
            same = start == self.documents[:, self.first + head + 1 : last + head + 1]
            yield given, wanted, same & (wanted != IGNORED_LABEL) & (given != IGNORED_LABEL)

    def states(self, speculator: Speculator) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for each head its states [b, t, inner], the tokens it should guess, and where it counts."""
        heads = list(self.per_head(speculator.config.n_predict))
        tokens = torch.stack([given.clamp(min=0) for given, _, _ in heads])
        hidden = self.hidden[:, self.first : self.first + tokens.shape[2]]
        for state, (_, wanted, counts) in zip(speculator.states(hidden, tokens), heads, strict=True):
            yield state, wanted, counts


def losses(speculator: Speculator, lesson: Lesson) -> Float[Tensor, "n"]:
    """Return each head's mean cross entropy in nats, given the tokens that came."""
    found = []
    for index, (state, wanted, counts) in enumerate(lesson.states(speculator)):
        labels = wanted.where(counts, IGNORED_LABEL).flatten()
        head = Head(speculator.output(index).weight)
        total, _ = cross_entropy(state.flatten(0, 1), head, labels, ignored=IGNORED_LABEL)
        found.append(total / counts.sum().clamp(min=1))
    return torch.stack(found)


@torch.no_grad()
def hits(speculator: Speculator, lesson: Lesson) -> list[tuple[int, int]]:
    """Return for each head at how many positions it was right, of how many where those before it were."""
    found, reached = [], None
    for index, (state, wanted, counts) in enumerate(lesson.states(speculator)):
        reached = counts if reached is None else reached & counts
        right = reached & (speculator.output(index)(state).argmax(-1) == wanted)
        found.append((int(right.sum()), int(reached.sum())))
        reached = right
    return found
