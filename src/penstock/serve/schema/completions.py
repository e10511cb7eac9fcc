"""Schema of `/v1/completions`."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.serve import parameters
from penstock.serve.schema.base import ABSENT, FIRST, Generation, OneOf, PromptLogprobs, Reply, TokenId, Usage

Prompt = Annotated[
    str
    | Annotated[list[str], FIRST]
    | Annotated[list[TokenId], FIRST]
    | Annotated[list[Annotated[list[TokenId], FIRST]], Field(max_length=10_000, fail_fast=True)],
    OneOf("a text, a list of texts, a list of token ids, or a list of up to 10,000 such lists"),
]


class CompletionRequest(Generation):
    """Body of /v1/completions."""

    not_honoured = parameters.COMPLETIONS
    prompt: Prompt
    echo: bool | None = None
    """Repeat the prompt before the answer; with `logprobs` also its log-probabilities."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return log-probabilities with this many likeliest alternatives."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Must equal `n`."""


class CompletionLogprobs(Reply):
    """Log-probabilities of a completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Character offset of each token in the text of the choice."""


class CompletionChoice(Reply):
    """One answer, or a part of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: int | str | None = ABSENT
    """Extension: the stop text, or the one of `stop_token_ids`, that ended the answer."""
    prompt_logprobs: PromptLogprobs | None = ABSENT
    prompt_token_ids: list[int] | None = ABSENT
    """In a stream: in the first chunk of a choice."""
    token_ids: list[int] | None = ABSENT


class Completion(Reply):
    """All answers, or parts of them in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = ABSENT
