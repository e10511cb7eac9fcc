"""POST /tokenize and /detokenize, with paths and keys as in vLLM."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request

from penstock.serve.chat.prompt import chat_prompt, encoded, ending_of
from penstock.serve.errors import ApiError
from penstock.serve.routes.dependencies import FAILURES, service_of
from penstock.serve.schema.base import FIRST, Body, Name, Reply, TokenId
from penstock.serve.schema.chat import TokenizeRequest
from penstock.serve.state import ModelInfo

router = APIRouter()


class Tokens(Reply):
    """Token ids and their count."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


@router.post("/tokenize", responses=FAILURES)
async def tokenize(body: TokenizeRequest, request: Request) -> Tokens:
    """Return the token ids of a text, or of a conversation up to the answer."""
    served = service_of(request).served.of(body.model)
    found = await asyncio.to_thread(_ids, body, served)
    return Tokens(
        tokens=found,
        count=len(found),
        max_model_len=served.context,
        token_strs=served.text_processor.tokenizer.spelled(found) if body.return_token_strs else None,
    )


class DetokenizeRequest(Body):
    """Token ids to decode."""

    tokens: Annotated[list[TokenId], FIRST]
    model: Name | None = None


class Text(Reply):
    """Decoded text."""

    prompt: str


@router.post("/detokenize", responses=FAILURES)
async def detokenize(body: DetokenizeRequest, request: Request) -> Text:
    """Return the text of token ids, with the names of special tokens."""
    tokenizer = service_of(request).served.of(body.model).text_processor.tokenizer
    return Text(prompt=await asyncio.to_thread(tokenizer.decode, body.tokens, special=True))


def _ids(body: TokenizeRequest, served: ModelInfo) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError("Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        return chat_prompt(
            body.messages,
            served,
            tools=body.tools or (),
            variables=body.chat_template_kwargs,
            ending=ending_of(body),
        )
    if body.tools or body.chat_template_kwargs or ending_of(body) != "asks":
        raise ApiError(
            "tools, chat_template_kwargs, add_generation_prompt and continue_final_message need messages.",
            param="messages",
        )
    text_processor = served.text_processor
    encode = text_processor.encode if body.add_special_tokens else text_processor.tokenizer.encode
    return encoded(body.prompt or "", served, encode, param="prompt")
