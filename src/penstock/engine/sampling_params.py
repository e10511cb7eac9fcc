"""Sampling settings and request parameters, with their defaults; no torch."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import cast

from penstock.core.checks import check_number, check_whole, is_number, is_whole
from penstock.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings: logits to the next token."""

    allowed_token_ids: tuple[int, ...] | None = None
    """Sample among these tokens only; None: all. End tokens must be listed to be possible."""
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    """Forbidden token sequences: the last token of each is excluded after the others."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit, from -100 (practically never) to 100 (practically always)."""
    repetition_penalty: float = 1.0
    """Penalty on tokens of prompt and answer; above 1: they become less likely; 0.01 to 100.

    Divides their positive and multiplies their negative logits (Keskar et al., arXiv:1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token in the answer so far; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of each token, times its occurrences in the answer so far; -2 to 2."""
    temperature: float = 1.0
    """Divisor of the logits; smaller: likelier tokens; 0: greedy, always the likeliest."""
    top_k: int | None = None
    """Sample among the k likeliest tokens; None: all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities reach this; 1: all."""
    min_p: float = 0.0
    """Sample among tokens with at least this share of the largest probability (arXiv:2407.01082); 0: all."""
    seed: int = 0
    """Random seed: the same seed, prompt and settings give the same tokens."""
    min_tokens: int = 0
    """Minimum length: no stop token or stop text ends the answer before."""
    num_logprobs: int | None = None
    """Return each token's log-probability, with this many likeliest alternatives; None: do not."""
    logprob_token_ids: tuple[int, ...] = ()
    """Return log-probabilities of these tokens instead of the likeliest."""

    def __post_init__(self) -> None:
        """Raise UsageError for values out of range."""
        check_number("temperature", self.temperature, 0, fix="0 is greedy.")
        if self.top_k is not None:
            check_whole("top_k", self.top_k, 1, fix="Leave it out to sample among all.")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise UsageError("top_p must be in (0, 1]", got=self.top_p, fix="1 samples among all tokens.")
        check_number("min_p", self.min_p, 0, 1, fix="0 samples among all tokens.")
        check_number("repetition_penalty", self.repetition_penalty, 0.01, 100, fix="1 turns it off.")
        check_number("presence_penalty", self.presence_penalty, -2, 2, fix="0 turns it off.")
        check_number("frequency_penalty", self.frequency_penalty, -2, 2, fix="0 turns it off.")
        _check_bias(self.logit_bias)
        check_whole("seed", self.seed, -(2**63), 2**63 - 1, fix="It is a signed number of 64 bits.")
        check_whole("min_tokens", self.min_tokens, 0, 2**31, fix="0 means no minimum.")
        if self.num_logprobs is not None:
            check_whole("num_logprobs", self.num_logprobs, 0, MAX_LOGPROBS, fix="Leave it out for none.")
        _check_ids("allowed_token_ids", self.allowed_token_ids, at_least=1)
        _check_ids("logprob_token_ids", self.logprob_token_ids)
        if not isinstance(cast(object, self.bad_words_ids), tuple):
            raise UsageError("bad_words_ids must be a tuple", got=self.bad_words_ids, fix="Write ((5, 6),).")
        for word in self.bad_words_ids:
            _check_ids("bad_words_ids", word, at_least=1)
        if self.logprob_token_ids and self.num_logprobs is None:
            raise UsageError(
                "logprob_token_ids is given without num_logprobs", got=self.logprob_token_ids, fix="Give 0."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Params:
    """Parameters of one request."""

    sampling: Sampling | None = None
    """Sampling settings; None: those of the model's `generation_config.json`, else temperature 1."""
    max_tokens: int | None = None
    """Maximum tokens of each answer; None: until the model's context is full."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end an answer and are not part of it."""
    stop_ids: frozenset[int] | None = None
    """Tokens that end an answer; None: the model's end tokens; empty: none."""
    num_answers: int = 1
    """Answers to each prompt, sampled independently."""
    adapter: str | None = None
    """Name of a LoRA adapter of the engine; None: the base model."""
    grammar: str | None = None
    """Grammar that answers must follow, written by `engine.sampling.grammar_text`; None: none."""
    num_prompt_logprobs: int | None = None
    """Return log-probabilities of the prompt tokens, with this many likeliest alternatives; None: do not."""
    priority: int = 0
    """Smaller values are scheduled first."""
    timeout_s: float | None = None
    """Time limit in seconds from the call; None: none."""

    def __post_init__(self) -> None:
        """Raise UsageError for values of a wrong type or out of range."""
        for name, kind in (("sampling", Sampling | None), ("adapter", str | None), ("grammar", str | None)):
            if not isinstance(getattr(self, name), kind):
                what, fix = _KIND[name]
                raise UsageError(f"{name} is {what}", got=getattr(self, name), fix=fix)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1, fix=_OR_NONE)
        check_whole("num_answers", self.num_answers, 1, fix="Ask for one answer or more.")
        check_whole("priority", self.priority, -(2**31), fix="0 is the default.")
        _check_stops(self.stop_texts, self.stop_ids)
        if self.num_prompt_logprobs is not None:
            check_whole("num_prompt_logprobs", self.num_prompt_logprobs, 0, MAX_LOGPROBS, fix=_OR_NONE)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 0, fix=_OR_NONE)


def params_for(given: Params | Many[Params], num: int) -> list[Params]:
    """Return one Params per prompt, from one for all or a list of one per prompt.

    Raises:
        UsageError: `given` is neither, or the list has another length.

    >>> len(params_for(Params(), 3))
    3
    """
    if isinstance(given, Params):
        return [given] * num
    several = list(given) if isinstance(given, list | tuple) else [cast(Params, given)]
    if not all(isinstance(cast(object, one), Params) for one in several):
        fix = "Write Params(max_tokens=100, sampling=Sampling(...)), or a list of one for each prompt."
        raise UsageError("params is neither a Params nor a list of them", got=given, fix=fix)
    if len(several) != num:
        raise UsageError(f"params must have one entry per prompt ({num})", got=len(several), fix="Give one.")
    return several


def _check_stops(texts: object, ids: object) -> None:
    if not isinstance(texts, list | tuple):
        fix = "Write (text,): a bare string would be split into its characters."
        raise UsageError("stop_texts must be a list or tuple of texts", got=texts, fix=fix)
    for text in texts:
        if not text or not isinstance(text, str):
            fault = "empty" if text == "" else "not a text"
            raise UsageError(f"A stop text is {fault}", got=texts, fix="Leave it out.")
    if ids is not None and not (isinstance(ids, Collection) and all(map(is_whole, ids))):
        raise UsageError("stop_ids must be a set of token ids", got=ids, fix="Write {id}, or leave it out.")


_OR_NONE = "Leave it out for none."
_KIND = {
    "sampling": ("not a Sampling", "Write Sampling(temperature=0.7)."),
    "adapter": ("not the name of an adapter", _OR_NONE),
    "grammar": (
        "not the text of a grammar",
        "Write it with json_schema, regex, choice or lark of penstock.engine.sampling.grammar_text.",
    ),
}


MAX_LOGPROBS = 20
"""Maximum number of log-probabilities per token, as in OpenAI's API."""


def check_vocabulary(sampling: Sampling, *, vocab_size: int) -> None:
    """Raise for settings with token ids outside the vocabulary.

    Raises:
        UsageError: a token id is `vocab_size` or more.
    """
    named = {
        "allowed_token_ids": sampling.allowed_token_ids or (),
        "bad_words_ids": tuple(token for word in sampling.bad_words_ids for token in word),
        "logit_bias": tuple(sampling.logit_bias),
        "logprob_token_ids": sampling.logprob_token_ids,
    }
    for name, tokens in named.items():
        if (most := max(tokens, default=0)) >= vocab_size:
            fix = f"Token ids are 0 to {vocab_size - 1:,}."
            raise UsageError(f"{name} has a token id outside the vocabulary", got=most, fix=fix)


def _check_ids(name: str, ids: object, *, at_least: int = 0) -> None:
    if ids is None:
        return
    if not isinstance(ids, tuple) or not all(is_whole(token) and token >= 0 for token in ids):
        raise UsageError(f"{name} must be a tuple of token ids", got=ids, fix="Write (5, 6).")
    if len(ids) < at_least:
        raise UsageError(f"{name} is empty", got=ids, fix="Name a token, or leave it out.")


def _check_bias(bias: Mapping[int, float]) -> None:
    if not isinstance(cast(object, bias), Mapping):
        raise UsageError("logit_bias must map token ids to numbers", got=bias, fix="Write {token: 5}.")
    for token, value in bias.items():
        if not is_whole(token):
            raise UsageError("logit_bias has a key that is not a token id", got=token, fix="Use token ids.")
        if not is_number(value):
            raise UsageError(f"logit_bias of token {token} must be a number", got=value, fix="0 is neutral.")
        if token < 0:
            raise UsageError("logit_bias has a negative token id", got=token, fix="Use token ids.")
        if not -100 <= value <= 100:
            raise UsageError(
                f"logit_bias of token {token} must be from -100 to 100",
                got=value,
                fix="-100 means practically never, 100 practically always.",
            )


GREEDY = Sampling(temperature=0.0)
"""Greedy decoding: always the likeliest token."""
