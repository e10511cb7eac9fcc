"""The smaller requests and answers: embeddings, models, tokens, health, errors."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.serve.schema.body import FIRST, Body, Name, Reply, TokenId
from penstock.serve.schema.chat import Message, TemplateValue, Tool
from penstock.serve.schema.completions import Prompt


class EmbeddingsRequest(Body):
    """Texts, or token ids."""

    input: Prompt
    model: Name | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Numbers of each vector; fewer than the model has where its config.json says it was trained for that."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of little-endian float32, which is what the openai client asks for."""
    user: str | None = None


class Embedding(Reply):
    """One vector of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Reply):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Reply):
    """One vector per input, in their order."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class Model(Reply):
    """What a request may name as its model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    """The model whose weights it has; another than `id` for an adapter."""
    max_model_len: int
    """Tokens of prompt and answer."""


class Models(Reply):
    """All of them."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeRequest(Body):
    """A text, or a conversation as the model sees it."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    model: Name | None = None
    add_special_tokens: bool = True
    """Also those that begin every text of this model; a conversation's are its template's affair."""
    add_generation_prompt: bool | None = None
    """Of a conversation, as in `/v1/chat/completions`; so are the next."""
    continue_final_message: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, TemplateValue] | None = None


class Tokens(Reply):
    """Token ids and their number."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(Body):
    """Token ids."""

    tokens: Annotated[list[TokenId], FIRST]
    model: Name | None = None


class Text(Reply):
    """A text."""

    prompt: str


class Health(Reply):
    """Whether the server lives or takes requests, and why not."""

    status: Literal["ok", "draining", "failed"]
    reason: str | None = None


class Load(Reply):
    """What the server has to do."""

    server_load: int


class Version(Reply):
    """Of Penstock."""

    version: str


class ErrorObject(Reply):
    """What is wrong, the value, and what to do."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(Reply):
    """Every answer that is not 2xx."""

    error: ErrorObject
