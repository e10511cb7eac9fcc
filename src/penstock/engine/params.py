"""How answers are made, as a caller of `LLM` says it: a request without its prompt; no torch."""

from dataclasses import dataclass, field
from typing import cast

from penstock.core.errors import UsageError
from penstock.engine.sampling import MAX_LOGPROBS, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """What may differ from one call to the next."""

    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn."""
    max_tokens: int | None = None
    """Tokens of each answer at most; None: until the model's context is full."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer and are no part of it."""
    stop_ids: frozenset[int] | None = None
    """Tokens that do; None: the model's end tokens, an empty set: none."""
    num_answers: int = 1
    """Answers to each prompt, drawn independently."""
    adapter: str | None = None
    """Name of a LoRA adapter of the engine; None: the base model."""
    grammar: str | None = None
    """What answers must follow, as `engine.structured` writes it; None: anything."""
    num_prompt_logprobs: int | None = None
    """Also say how likely the prompt's tokens were, beside so many likeliest; None: do not."""
    priority: int = 0
    """Smaller goes first."""
    timeout_s: float | None = None
    """When to give up, from now; None: never."""

    def __post_init__(self) -> None:
        """Refuse what no answer could follow."""
        if self.num_answers < 1:
            raise UsageError("num_answers must be at least 1", got=self.num_answers)
        if isinstance(cast(object, self.stop_texts), str):  # who has no type checker
            fix = "Write (text,): each character of a text would be one."
            raise UsageError("stop_texts must be several texts", got=self.stop_texts, fix=fix)
        if any(not stop for stop in self.stop_texts):
            raise UsageError("A stop text is empty", got=self.stop_texts, fix="Leave it out.")
        if self.num_prompt_logprobs is not None and not 0 <= self.num_prompt_logprobs <= MAX_LOGPROBS:
            raise UsageError(
                f"num_prompt_logprobs must be from 0 to {MAX_LOGPROBS}",
                got=self.num_prompt_logprobs,
                fix="Leave it out for none.",
            )
        if self.timeout_s is not None and not self.timeout_s >= 0:  # nor nan, which no deadline comes after
            raise UsageError("timeout_s must be at least 0", got=self.timeout_s, fix="Leave it out for none.")
