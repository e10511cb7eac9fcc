"""POST /v1/embeddings."""

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from penstock.core import clock
from penstock.engine import request as engine
from penstock.serve.prompts import prompts_of
from penstock.serve.requests import check_embedded
from penstock.serve.routes.asking import FAILURES, reply, service_of, visit_of
from penstock.serve.schema.others import Embedding, Embeddings, EmbeddingsRequest, EmbeddingsUsage
from penstock.serve.served import Service
from penstock.serve.tally import Tally
from penstock.serve.vectors import shortened, to_base64

router = APIRouter()


@router.post("/v1/embeddings", response_model=Embeddings, responses=FAILURES)
async def embed(body: EmbeddingsRequest, request: Request) -> Response:
    """Return one vector of length 1 per text."""
    service, visit = service_of(request), visit_of(request)
    service.check_open()
    requests = await asyncio.to_thread(_requests, body, service, client=visit.client)
    vectors, num_tokens = [], 0
    for begin in range(0, len(requests), service.limits.max_prompts):
        some = requests[begin : begin + service.limits.max_prompts]
        tally = Tally(visit.opened(service.bridge.submit(some)))
        vectors += await _vectors(tally, len(some))
        num_tokens += tally.usage().prompt_tokens
    lengths = service.served.words.vector_lengths
    cut = [shortened(vector, body.dimensions, lengths=lengths) for vector in vectors]
    as_text = body.encoding_format == "base64"
    return reply(
        Embeddings(
            data=[
                Embedding(index=index, embedding=to_base64(vector) if as_text else vector)
                for index, vector in enumerate(cut)
            ],
            model=body.model or service.served.name,
            usage=EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )
    )


async def _vectors(tally: Tally, num_texts: int) -> list[tuple[float, ...]]:
    vectors: list[tuple[float, ...]] = [()] * num_texts
    async for index, piece in tally:
        if piece.embedding is not None:
            vectors[index] = piece.embedding
    return vectors


def _requests(body: EmbeddingsRequest, service: Service, *, client: str) -> list[engine.Request]:
    served, limits = service.served, service.limits
    prompts = prompts_of(body.input, served, max_prompts=limits.max_texts, param="input")
    for prompt in prompts:
        check_embedded(prompt, served)
    deadline_s = None if limits.deadline_s is None else clock.monotonic() + limits.deadline_s
    return [
        engine.Request(
            prompt=tuple(prompt),
            max_tokens=0,
            client=client,
            adapter=served.adapter_of(body.model),
            deadline_s=deadline_s,
            task="embed",
        )
        for prompt in prompts
    ]
