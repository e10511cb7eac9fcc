"""POST /v1/embeddings, /v1/score and /v1/rerank: schema, and embeddings as numbers or base64."""

import asyncio
import base64
import math
from array import array
from collections.abc import Sequence
from functools import partial
from sys import byteorder
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from penstock.core import clock
from penstock.core.errors import UsageError
from penstock.engine import request as engine
from penstock.serve.chat.prompt import prompts_of
from penstock.serve.engine_request import check_embedded, truncated
from penstock.serve.errors import ApiError, api_error_of
from penstock.serve.output_stream import UsageCounter
from penstock.serve.routes.dependencies import FAILURES, new_id, reply, service_of, visit_of
from penstock.serve.schema.base import ABSENT, Name, OneOf, Reply, Truncation
from penstock.serve.schema.completions import Prompt
from penstock.serve.state import AppState

router = APIRouter()

Vectors = list[tuple[float, ...]]
"""Embeddings of length 1."""


class EmbeddingsRequest(Truncation):
    """Texts or token ids to embed."""

    input: Prompt
    model: Name | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Length of each embedding; less than the model's own only if its config.json says it was trained for
    that."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: little-endian float32, the default of the openai client."""
    user: str | None = None


class Embedding(Reply):
    """Embedding of one input, a vector of length 1."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Reply):
    """Token counts over all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Reply):
    """Embeddings in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


@router.post("/v1/embeddings", response_model=Embeddings, responses=FAILURES)
async def embed(body: EmbeddingsRequest, request: Request) -> Response:
    """Embed texts: one vector of length 1 per text."""
    [vectors], usage = await _vectors(request, body, input=body.input)
    served = service_of(request).served.of(body.model)
    lengths = served.text_processor.embedding.lengths
    cut = [shortened(vector, body.dimensions, lengths=lengths) for vector in vectors]
    as_text = body.encoding_format == "base64"
    return reply(
        Embeddings(
            data=[
                Embedding(index=index, embedding=to_base64(vector) if as_text else vector)
                for index, vector in enumerate(cut)
            ],
            model=served.name,
            usage=usage,
        )
    )


Texts = Annotated[
    str | Annotated[list[str], Field(min_length=1, fail_fast=True)], OneOf("a text or a list of texts")
]


class ScoreRequest(Truncation):
    """Pairs of texts: one text with each of several, or two lists of equal length."""

    text_1: Texts
    text_2: Texts
    model: Name | None = None


class PairScore(Reply):
    """Similarity of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float
    """Cosine similarity, -1 to 1."""


class Scores(Reply):
    """Similarities in the order of the pairs."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PairScore]
    usage: EmbeddingsUsage


@router.post("/score", response_model=Scores, responses=FAILURES, include_in_schema=False)
@router.post("/v1/score", response_model=Scores, responses=FAILURES)
async def score(body: ScoreRequest, request: Request) -> Response:
    """Compute the similarity of pairs of texts."""
    ones, others = ([text] if isinstance(text, str) else text for text in (body.text_1, body.text_2))
    if len(ones) not in (1, len(others)):
        raise ApiError(
            f"text_1 has {len(ones):,} texts and text_2 {len(others):,}. Give one, or equally many.",
            param="text_1",
        )
    [first, second], usage = await _vectors(request, body, text_1=ones, text_2=others)
    first = first * len(second) if len(first) == 1 else first
    scores = await asyncio.to_thread(_cosines, first, second)
    return reply(
        Scores(
            id=new_id("score"),
            created=int(clock.unix_seconds()),
            model=service_of(request).served.of(body.model).name,
            data=[PairScore(index=index, score=score) for index, score in enumerate(scores)],
            usage=usage,
        )
    )


class RerankRequest(Truncation):
    """A query, and documents to rank by similarity to it."""

    query: str
    documents: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Number of results; 0: all."""
    return_documents: bool = True
    model: Name | None = None


class RerankDocument(Reply):
    """Text of a document."""

    text: str


class RerankResult(Reply):
    """Rank of one document."""

    index: int
    """Index of the document in the request."""
    document: RerankDocument | None = ABSENT
    relevance_score: float


class Ranking(Reply):
    """Documents by descending similarity."""

    id: str
    model: str
    usage: EmbeddingsUsage
    results: list[RerankResult]


@router.post("/rerank", response_model=Ranking, responses=FAILURES, include_in_schema=False)
@router.post("/v2/rerank", response_model=Ranking, responses=FAILURES, include_in_schema=False)
@router.post("/v1/rerank", response_model=Ranking, responses=FAILURES)
async def rerank(body: RerankRequest, request: Request) -> Response:
    """Rank documents by similarity to a query."""
    [[query], documents], usage = await _vectors(request, body, query=[body.query], documents=body.documents)
    scores = await asyncio.to_thread(_cosines, [query] * len(documents), documents)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])  # stable: equals keep their order
    return reply(
        Ranking(
            id=new_id("rerank"),
            model=service_of(request).served.of(body.model).name,
            usage=usage,
            results=[
                RerankResult(
                    index=index,
                    document=RerankDocument(text=body.documents[index]) if body.return_documents else None,
                    relevance_score=scores[index],
                )
                for index in order[: body.top_n or None]
            ],
        )
    )


def _cosines(ones: Vectors, others: Vectors) -> list[float]:
    """Return the cosine of each pair of vectors of length 1, limited to [-1, 1] against rounding."""
    products = (
        math.fsum(a * b for a, b in zip(one, other, strict=True))
        for one, other in zip(ones, others, strict=True)
    )
    return [max(-1.0, min(1.0, product)) for product in products]


async def _vectors(
    request: Request, body: EmbeddingsRequest | ScoreRequest | RerankRequest, **texts: Prompt
) -> tuple[list[Vectors], EmbeddingsUsage]:
    """Return the embeddings of each list of texts, by its key in the request."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    groups = [
        await asyncio.to_thread(_requests, key, given, body, service, client=visit.client)
        for key, given in texts.items()
    ]
    requests = [one for group in groups for one in group]
    vectors: Vectors = []
    num_tokens = 0
    for begin in range(0, len(requests), service.limits.max_prompts):
        some = requests[begin : begin + service.limits.max_prompts]
        tally = UsageCounter(visit.opened(service.bridge.submit(some)))
        vectors += await _computed(tally, len(some))
        num_tokens += tally.usage().prompt_tokens
    found = iter(vectors)
    usage = EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return [[next(found) for _ in group] for group in groups], usage


async def _computed(tally: UsageCounter, num_texts: int) -> Vectors:
    vectors: Vectors = [()] * num_texts
    async for index, delta in tally:
        if delta.embedding is not None:
            vectors[index] = delta.embedding
    return vectors


def _requests(
    key: str,
    given: Prompt,
    body: EmbeddingsRequest | ScoreRequest | RerankRequest,
    service: AppState,
    *,
    client: str,
) -> list[engine.Request]:
    served, limits = service.served.of(body.model), service.limits
    text_processor = served.text_processor
    try:
        text_processor.embedding.check()
    except UsageError as error:
        raise api_error_of(error, param="model") from None
    added = len(text_processor.start_ids) + len(text_processor.end_ids)
    room = min(served.context, text_processor.embedding.max_tokens or served.context)

    def kept(ids: Sequence[int], *, added: int = 0) -> Sequence[int]:
        return truncated(ids, body, room=room, side="right", added=added)

    prompts: Sequence[Sequence[int]] = prompts_of(
        given,
        served,
        max_prompts=limits.max_texts,
        param=key,
        truncates=body.truncate_prompt_tokens is not None,
        encode=lambda text: text_processor.encode_embedded(text, keep=partial(kept, added=added)),
    )
    if not isinstance(given, str) and not isinstance(given[0], str):
        prompts = [kept(ids) for ids in prompts]
    for prompt in prompts:
        check_embedded(prompt, served, param=key)
    deadline_s = None if limits.deadline_s is None else clock.monotonic() + limits.deadline_s
    return [
        engine.Request(
            prompt=tuple(prompt),
            max_tokens=0,
            client=client,
            adapter=served.adapter,
            deadline_s=deadline_s,
            task="embed",
        )
        for prompt in prompts
    ]


_FIX = "Leave dimensions out."


def shortened(vector: Sequence[float], length: int | None, *, lengths: Sequence[int] | None) -> list[float]:
    """Return the first `length` numbers of a vector, normalised to length 1 again.

    Args:
        length: length of the result; None: unchanged.
        lengths: lengths that the model was trained for, besides the full one (Matryoshka; Kusupati et
            al., arXiv:2205.13147); None: any.

    Raises:
        ApiError: the vector is shorter, or the model was not trained for this length.

    >>> shortened([0.6, 0.0, 0.8], 1, lengths=[1])
    [1.0]
    """
    if length is None or length == len(vector):
        return list(vector)
    if length > len(vector):
        said = f"The embeddings of this model have {len(vector):,} dimensions (got {length:,})."
        raise ApiError(f"{said} {_FIX}", param="dimensions")
    if lengths is not None and length not in lengths:
        said = (
            "The model was not trained for shortened embeddings: its config.json has no is_matryoshka"
            if not lengths
            else f"The model was trained for embeddings of {', '.join(map(str, sorted(lengths)))} dimensions"
        )
        raise ApiError(f"{said} (got {length:,}). {_FIX}", param="dimensions")
    kept = vector[:length]
    norm = math.hypot(*kept) or 1.0
    return [value / norm for value in kept]


def to_base64(vector: Sequence[float]) -> str:
    """Return little-endian float32 numbers as base64.

    >>> to_base64((1.0,))
    'AACAPw=='
    """
    numbers = array("f", vector)
    if byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode()
