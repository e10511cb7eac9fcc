"""`/v1/completions`: text goes on from a prompt."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.serve.schema.body import ABSENT, FIRST, OneOf, Reply, TokenId
from penstock.serve.schema.generation import Generation, Usage

Prompt = Annotated[
    str
    | Annotated[list[str], FIRST]
    | Annotated[list[TokenId], FIRST]
    | Annotated[list[Annotated[list[TokenId], FIRST]], Field(max_length=10_000, fail_fast=True)],
    OneOf("a text, a list of texts, a list of token ids, or a list of up to 10,000 such lists"),
]


class CompletionRequest(Generation):
    """What is asked."""

    prompt: Prompt
    echo: bool | None = None
    """The prompt comes before the answer, and with `logprobs` also its log-probabilities."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """So many likeliest tokens beside each token."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Only as many as `n`."""
    suffix: None = None
    """Filling in is not supported."""


class CompletionLogprobs(Reply):
    """How likely each token was."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token begins in the text of the choice."""


class CompletionChoice(Reply):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None


class Completion(Reply):
    """The answers, or pieces of them in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = ABSENT
