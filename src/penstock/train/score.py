"""Score of a model on text: loss, perplexity and bits per byte, as sums that can be added.

Perplexity is exp(loss): the number of equally likely tokens that would be as uncertain. Bits per byte is the
loss in bits over the bytes of text of the predicted tokens (Gao et al., "The Pile", arXiv:2101.00027, section
3.1): comparable between tokenizers, unlike a loss per token. A token without text, such as the end of a
document, adds to the loss only. The first token of each document fragment in a row is not predicted, so it
counts in neither.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Sums over predicted tokens."""

    nats: float
    """Summed loss."""
    tokens: int
    """Number of tokens."""
    text_bytes: int
    """Bytes of their text; 0: unknown."""

    def __add__(self, other: "Score") -> "Score":
        """Return the score of both texts; bytes are known only if both are."""
        known = all(score.text_bytes or not score.tokens for score in (self, other))
        return Score(
            nats=self.nats + other.nats,
            tokens=self.tokens + other.tokens,
            text_bytes=self.text_bytes + other.text_bytes if known else 0,
        )

    @property
    def loss(self) -> float:
        """Mean loss in nats per token; 0 without tokens."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond what a float holds."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Loss in bits per byte of text; None: bytes unknown."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None


def total(scores: Mapping[str, Score]) -> Score:
    """Return the score of all corpora together, weighted by tokens.

    >>> part = Score(nats=6.0, tokens=3, text_bytes=9)
    >>> both = total({"a": part, "b": Score(nats=4.0, tokens=1, text_bytes=3)})
    >>> both.loss, both.text_bytes
    (2.5, 12)
    """
    return sum(scores.values(), Score(nats=0.0, tokens=0, text_bytes=0))


def validation_record(scores: Mapping[str, Score], *, step: int) -> dict[str, Any]:  # Any: JSON values
    """Return the record of a validation; metric names are those of obs/metric_names.py."""
    whole = total(scores)
    scored = {name: score for name, score in scores.items() if score.tokens}
    bits = {name: score.bits_per_byte for name, score in scored.items() if score.text_bytes}
    return {
        "step": step,
        "validation_loss": whole.loss,
        "validation_perplexity": whole.perplexity,
        **({} if whole.bits_per_byte is None else {"validation_bits_per_byte": whole.bits_per_byte}),
        "corpus_validation_loss": {name: score.loss for name, score in scored.items()},
        "corpus_perplexity": {name: score.perplexity for name, score in scored.items()},
        **({"corpus_bits_per_byte": bits} if bits else {}),
    }
