"""Recipe section [samples]: prompts answered while training; no torch."""

from dataclasses import dataclass
from typing import Any

from penstock.core.checks import at_least
from penstock.core.errors import ConfigError

MAX_PROMPTS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleChat:
    """Conversation to answer, and what the model may call."""

    messages: tuple[dict[str, Any], ...]
    """Messages: {role = "user", content = "..."}."""
    tools: tuple[dict[str, Any], ...] = ()
    """Functions as JSON: {type = "function", function = {name = "...", parameters = {...}}}."""

    def __post_init__(self) -> None:
        if not self.messages:
            raise ConfigError(
                "A prompt of samples.prompts has no messages",
                fix='Write messages = [{role = "user", content = "..."}].',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesConfig:
    """Prompts answered now and then by the model as it is then: to read before any curve."""

    every: int = 0
    """Steps between samples; the last step has one too, and so has a start from weights. 0: never. Training
    waits meanwhile: a second or so on a small model, and a copy of the weights in `compute` on rank 0."""
    prompts: tuple[tuple[dict[str, Any], ...] | SampleChat | str, ...] = ()
    """Prompts: texts to continue, or conversations to answer: lists of {role = "user", content = "..."},
    written by the chat template of the start. With tools: {messages = [...], tools = [...]}, as in a line
    of conversations; the answer is then the text of a call."""
    heldout: int = 0
    """Number of prompts taken from held-out documents: the beginning of a text, or of a conversation up to
    its first answer; the true continuation is recorded with the answer. Needs data.holdout."""
    max_tokens: int = 64
    """Maximum number of tokens of an answer. Tokens are the likeliest ones (greedy), so that answers of two
    steps differ by what was learned between them."""

    def __post_init__(self) -> None:
        at_least(0, "samples.every", self.every)
        at_least(0, "samples.heldout", self.heldout)
        at_least(1, "samples.max_tokens", self.max_tokens)
        number = len(self.prompts) + self.heldout
        if number > MAX_PROMPTS:
            raise ConfigError(
                f"samples.prompts and samples.heldout are {number} prompts",
                fix=f"At most {MAX_PROMPTS} are answered: they are for reading. [evaluate] scores many.",
            )
        if self.every and not number:
            raise ConfigError(
                "samples.every has nothing to answer",
                got=self.every,
                fix='Set samples.prompts = ["..."], or samples.heldout = 4 to take held-out documents.',
            )
        for index, prompt in enumerate(self.prompts):
            if not prompt:
                raise ConfigError(f"samples.prompts[{index}] is empty", fix="Remove it, or write a text.")
