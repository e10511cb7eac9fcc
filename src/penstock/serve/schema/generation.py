"""What requests for completions and for chats have in common, and what both answers count."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.serve.schema.body import FIRST, Body, Name, OneOf, Reply, TokenId
from penstock.serve.schema.formats import Choice, ResponseFormat, SchemaOrText, StructuredOutputs


class StreamOptions(Body):
    """What a stream has besides its pieces."""

    include_usage: bool = False
    """A last chunk without choices counts the tokens."""
    continuous_usage_stats: bool = False
    """Beyond the API: every chunk counts them, up to itself."""
    include_obfuscation: bool | None = None
    """Accepted, without effect."""


class Generation(Body):
    """How answers are made. Null everywhere means: as if it were left out."""

    model: Name | None = None
    """The served model or one of its adapters; left out: the model."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: Annotated[str | Annotated[list[str], FIRST], OneOf("a text or a list of texts")] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    """Left out: another one for each request."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """1 where left out, as the API has it."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    """Token id, as a text because it is a key of JSON, to what is added to its logit."""

    # Beyond the API of OpenAI, under the names that vLLM gives them.
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """-1 or 0: among all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop_token_ids: Annotated[list[TokenId], FIRST] | None = None
    ignore_eos: bool | None = None
    """Go on after the model's own end tokens."""
    priority: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Larger waits longer; a client can put itself behind others, not before them."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """What is computed of the prompt is found only by requests with the same."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choice | None = None
    guided_grammar: str | None = None

    # As it is here; anything else is refused.
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    use_beam_search: Literal[False] | None = None
    return_token_ids: Literal[False] | None = None

    # Accepted, without effect: bookkeeping of OpenAI's own service.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def wants_stream(self) -> bool:
        """Whether pieces are sent as they come."""
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a count of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_running_usage(self) -> bool:
        """Whether each chunk has such a count too."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class PromptTokensDetails(Reply):
    """What of the prompt was found computed."""

    cached_tokens: int


class Usage(Reply):
    """Tokens of a request, over all its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
