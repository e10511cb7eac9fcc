"""How tokens are drawn, as settings: no torch, so that a help text can show the defaults."""

from dataclasses import dataclass

from penstock.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.8
    """Logits are divided by this; 0: always the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest; None: all."""
    top_p: float = 0.95
    """Draw among the fewest tokens whose probabilities reach this; 1: all."""
    seed: int = 0
    """The same seed, prompt and settings give the same tokens."""

    def __post_init__(self) -> None:
        """Refuse settings under which nothing could be drawn."""
        if not 0 <= self.temperature < float("inf"):
            raise UsageError("temperature must be at least 0", got=self.temperature, fix="0 is greedy.")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(
                "top_k must be at least 1", got=self.top_k, fix="Leave it out to draw among all."
            )
        if not 0 < self.top_p <= 1:
            raise UsageError("top_p must be in (0, 1]", got=self.top_p, fix="1 draws among all tokens.")


GREEDY = Sampling(temperature=0.0)
"""Always the likeliest token."""
