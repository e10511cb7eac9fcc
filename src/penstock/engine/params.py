"""How answers are made, as a caller of `LLM` says it: a request without its prompt; no torch."""

from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import cast

from penstock.core.errors import UsageError
from penstock.core.ranges import check_number, check_whole, is_whole
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
        """Refuse what no answer could follow; who has no type checker is told what belongs where."""
        for name, kind in (("sampling", Sampling), ("adapter", str | None), ("grammar", str | None)):
            if not isinstance(getattr(self, name), kind):
                what, fix = _KIND[name]
                raise UsageError(f"{name} is {what}", got=getattr(self, name), fix=fix)
        if self.max_tokens is not None:
            check_whole("max_tokens", self.max_tokens, 1, fix=_OR_NONE)
        check_whole("num_answers", self.num_answers, 1, fix="Ask for one answer or more.")
        check_whole("priority", self.priority, -(2**31), fix="0 is that of others.")
        _check_stops(self.stop_texts, self.stop_ids)
        if self.num_prompt_logprobs is not None:
            check_whole("num_prompt_logprobs", self.num_prompt_logprobs, 0, MAX_LOGPROBS, fix=_OR_NONE)
        if self.timeout_s is not None:
            check_number("timeout_s", self.timeout_s, 0, fix=_OR_NONE)


def params_for(given: Params | Many[Params], num: int) -> list[Params]:
    """Return the settings of each of so many prompts, of what may be one for all or one for each.

    Raises:
        UsageError: it is neither.

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
        raise UsageError(f"There are {num} prompts and not as many params", got=len(several), fix="Give one.")
    return several


def _check_stops(texts: object, ids: object) -> None:
    if not isinstance(texts, list | tuple):
        fix = "Write (text,): each character of a text would be one."
        raise UsageError("stop_texts must be several texts", got=texts, fix=fix)
    for text in texts:
        if not text or not isinstance(text, str):
            fault = "empty" if text == "" else "no text"
            raise UsageError(f"A stop text is {fault}", got=texts, fix="Leave it out.")
    if ids is not None and not (isinstance(ids, Collection) and all(map(is_whole, ids))):
        raise UsageError("stop_ids must be several token ids", got=ids, fix="Write {id}, or leave it out.")


_OR_NONE = "Leave it out for none."
_KIND = {
    "sampling": ("no Sampling", "Write Sampling(temperature=0.7)."),
    "adapter": ("no name of an adapter", _OR_NONE),
    "grammar": (
        "no text of a grammar",
        "Write it with json_schema, regex, choice or lark of penstock.engine.structured.",
    ),
}
