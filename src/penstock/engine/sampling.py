"""How tokens are drawn, as settings: no torch, so that a help text can show the defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from penstock.core.errors import UsageError
from penstock.core.ranges import check_number, check_whole, is_number, is_whole

MAX_LOGPROBS = 20
"""Likeliest tokens that may be asked for beside each drawn one, as in OpenAI's API."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; what each setting does to the logits comes in the order of the fields."""

    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token -> what is added to its logit, from -100 (as good as never) to 100 (as good as always)."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of all tokens in prompt and answer
    (Keskar et al., arXiv:1909.05858); 1: off, above: new tokens are likelier; 0.01 to 100."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token in the answer so far; -2 to 2."""
    frequency_penalty: float = 0.0
    """Taken from the logit of each token once for every time it is in the answer so far; -2 to 2."""
    temperature: float = 0.8
    """Logits are divided by this; 0: always the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest; None: all."""
    top_p: float = 0.95
    """Draw among the fewest tokens whose probabilities reach this; 1: all."""
    min_p: float = 0.0
    """Draw among tokens at least this times as probable as the likeliest (arXiv:2407.01082); 0: all."""
    seed: int = 0
    """The same seed, prompt and settings give the same tokens."""
    min_tokens: int = 0
    """No end token or stop text ends the answer before it has this many tokens."""
    num_logprobs: int | None = None
    """Say how likely each drawn token was, beside so many likeliest ones; None: do not."""

    def __post_init__(self) -> None:
        """Refuse settings under which nothing could be drawn."""
        check_number("temperature", self.temperature, 0, fix="0 is greedy.")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1, fix="Leave it out to draw among all.")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise UsageError("top_p must be in (0, 1]", got=self.top_p, fix="1 draws among all tokens.")
        check_number("min_p", self.min_p, 0, 1, fix="0 draws among all tokens.")
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100, fix="1 turns it off.")
        check_number("presence_penalty", self.presence_penalty, -2, 2, fix="0 turns it off.")
        check_number("frequency_penalty", self.frequency_penalty, -2, 2, fix="0 turns it off.")
        _check_bias(self.logit_bias)
        check_whole("seed", self.seed, -(2**63), 2**63 - 1, fix="It is a signed number of 64 bits.")
        check_whole("min_tokens", self.min_tokens, 0, 2**31, fix="0 lets an answer end at any token.")
        if self.num_logprobs is not None:
            check_whole("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS, fix="Leave it out for none.")


def check_bias(sampling: Sampling, *, vocab_size: int) -> None:
    """Refuse a bias on a token that the model does not have.

    Raises:
        UsageError: there is one.
    """
    if (most := max(sampling.logit_bias, default=0)) >= vocab_size:
        fix = f"Its tokens are 0 to {vocab_size - 1:,}."
        raise UsageError("logit_bias has a token that the model does not know", got=most, fix=fix)


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(cast(object, bias), Mapping):
        raise UsageError(
            "logit_bias must say what is added to which token", got=bias, fix="Write {token: 5}."
        )
    for token, value in bias.items():
        if not is_whole(token):
            raise UsageError("logit_bias has a key that is no token id", got=token, fix="Give whole numbers.")
        if not is_number(value):
            raise UsageError(f"logit_bias of token {token} is no number", got=value, fix="0 changes nothing.")
        if token < 0:
            raise UsageError("logit_bias has a token below 0", got=token, fix="Give ids of tokens.")
        if not -100 <= value <= 100:
            raise UsageError(
                f"logit_bias of token {token} must be from -100 to 100",
                got=value,
                fix="-100 is as good as never, 100 as good as always.",
            )


GREEDY = Sampling(temperature=0.0)
"""Always the likeliest token."""
