"""POST /tokenize and /detokenize, with the addresses and keys that vLLM gives them."""

import asyncio

from fastapi import APIRouter, Request

from penstock.serve.errors import ApiError
from penstock.serve.prompts import chat_prompt, ending_of
from penstock.serve.routes.asking import FAILURES, service_of
from penstock.serve.schema.others import DetokenizeRequest, Text, TokenizeRequest, Tokens
from penstock.serve.served import Service

router = APIRouter()


@router.post("/tokenize", responses=FAILURES)
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    """Return the ids of a text, or of a conversation up to the answer."""
    service = service_of(request)
    service.served.adapter_of(body.model)
    found = await asyncio.to_thread(_ids, body, service)
    return Tokens(tokens=found, count=len(found), max_model_len=service.served.context)


@router.post("/detokenize", responses=FAILURES)
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """Return the text of ids, with the names of special tokens."""
    service = service_of(request)
    service.served.adapter_of(body.model)
    tokenizer = service.served.words.tokenizer
    return Text(prompt=await asyncio.to_thread(tokenizer.decode, body.tokens, special=True))


def _ids(body: TokenizeRequest, service: Service) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        return chat_prompt(
            body.messages,
            service,
            tools=body.tools or (),
            variables=body.chat_template_kwargs,
            ending=ending_of(body),
        )
    if body.tools or body.chat_template_kwargs or ending_of(body) != "asks":
        raise ApiError(
            400,
            "tools, chat_template_kwargs, add_generation_prompt and continue_final_message go with messages.",
            param="messages",
        )
    text, words = body.prompt or "", service.served.words
    return words.encode(text) if body.add_special_tokens else words.tokenizer.encode(text)
