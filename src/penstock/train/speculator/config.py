"""What heads are trained, on what, for how long; no torch."""

from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError

Stage = Literal["text", "own"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculatorTraining:
    """The two stages of arXiv:2404.19124: on text, then on what the model itself writes."""

    steps: int
    """In all."""
    own_share: float = 0.25
    """Share of the steps, the last ones, that train on what the model writes after beginnings of the text.
    They cost the writing, and teach what drafts are asked for: the model's own choices."""
    num_heads: int = 3
    """Tokens guessed ahead."""
    inner_dim: int | None = None
    """Size of the heads' states; None: the model's hidden size."""
    sequence_length: int = 512
    """Tokens per row of text."""
    batch_size: int = 8
    """Rows per step."""
    prompt_tokens: int = 32
    """Of a row of text, in the second stage."""
    own_tokens: int = 96
    """Written after them."""
    learning_rate: float = 1e-3
    """At its peak; a tenth of the steps lead up to it, a cosine leads down to a tenth of it."""
    holdout: float = 0.05
    """Share of the documents that is not trained on, to measure with."""
    seed: int = 0
    """Keys the first weights, the order of the text and what the model writes."""

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        for name in ("steps", "num_heads", "batch_size", "prompt_tokens", "own_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", got=getattr(self, name))
        if self.inner_dim is not None and self.inner_dim < 1:
            raise ConfigError("inner_dim must be at least 1", got=self.inner_dim, fix="Leave it out.")
        if self.sequence_length < self.num_heads + 2 or self.sequence_length < self.prompt_tokens:
            raise ConfigError(
                "sequence_length must hold a prompt and more tokens than there are heads",
                got=self.sequence_length,
                fix=f"Give at least {max(self.num_heads + 2, self.prompt_tokens)}.",
            )
        for name in ("own_share", "holdout"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} must be from 0 to less than 1", got=getattr(self, name))
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError("learning_rate must be positive", got=self.learning_rate)

    def stage_of(self, step: int) -> Stage:
        """Return what a step trains on.

        >>> training = SpeculatorTraining(steps=8)
        >>> [training.stage_of(step) for step in (0, 5, 6, 7)]
        ['text', 'text', 'own', 'own']
        """
        return "text" if step < self._text_steps else "own"

    def tokens_before(self, step: int) -> int:
        """Return how many tokens the steps before a step hold.

        >>> SpeculatorTraining(steps=8, batch_size=2).tokens_before(7)
        6400
        """
        on_text = min(step, self._text_steps)
        own = (step - on_text) * (self.prompt_tokens + self.own_tokens)
        return self.batch_size * (on_text * self.sequence_length + own)

    @property
    def _text_steps(self) -> int:
        return self.steps - round(self.steps * self.own_share)
