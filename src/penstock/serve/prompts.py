"""Texts and conversations to token ids; slow for long ones, so routes call these in a thread."""

import json
from collections.abc import Sequence
from typing import Literal

from penstock.serve.errors import ApiError
from penstock.serve.schema.chat import (
    AssistantMessage,
    ChatRequest,
    Content,
    Message,
    TemplateValue,
    Tool,
)
from penstock.serve.schema.completions import Prompt
from penstock.serve.schema.others import TokenizeRequest
from penstock.serve.served import Served, Service

Ending = Literal["asks", "stops", "goes_on"]

_END_MARK = "\ufdd2\ufdd3"
"""Where the last message ends, in what a template makes of it: code points that Unicode keeps free."""


def prompts_of(prompt: Prompt, served: Served, *, max_prompts: int, param: str) -> list[list[int]]:
    """Return the ids of each prompt of a request.

    Args:
        param: the key of the request, for messages.

    Raises:
        ApiError: there are too many, or none.
    """
    if isinstance(prompt, str):
        return [served.words.encode(prompt)]
    if not prompt:
        raise ApiError(400, f"{param} is an empty list. Give at least one text.", param=param)
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    if len(prompt) > max_prompts:
        raise ApiError(
            400, f"{param} has {len(prompt):,} entries, at most {max_prompts:,} are taken.", param=param
        )
    return [served.words.encode(one) if isinstance(one, str) else _ids(one) for one in prompt]


def chat_prompt(
    messages: Sequence[Message],
    service: Service,
    *,
    tools: Sequence[Tool] = (),
    variables: dict[str, TemplateValue] | None = None,
    ending: Ending = "asks",
) -> list[int]:
    """Return the ids of a conversation.

    Args:
        ending: where they end: with those that begin an answer, with the last turn, or inside of it, where
            its text does.

    Raises:
        ApiError: the arguments of a call are no JSON object.
        UsageError: the model's chat template refuses these messages.
        ModelError: the template fails.
    """
    words = service.served.words
    turns = [_turn(message) for message in messages]
    if ending == "goes_on":
        turns[-1] = _marked(turns[-1])
    text = service.templates.render(
        words.guarded(turns),
        tools=words.guarded([tool.model_dump(exclude_none=True) for tool in tools]),
        variables=words.guarded(variables),
        asks=ending == "asks",
    )
    return words.encode_rendered(_before_mark(text) if ending == "goes_on" else text)


def ending_of(body: ChatRequest | TokenizeRequest) -> Ending:
    """Return where the prompt of a conversation ends.

    Raises:
        ApiError: it is to go on with its last message and to begin another.
    """
    if not body.continue_final_message:
        return "stops" if body.add_generation_prompt is False else "asks"
    if body.add_generation_prompt:
        raise ApiError(
            400,
            "An answer continues the final message or begins one, not both. "
            "Give add_generation_prompt: false.",
            param="add_generation_prompt",
        )
    return "goes_on"


def _marked(turn: dict[str, object]) -> dict[str, object]:
    if turn["role"] != "assistant" or turn.get("tool_calls"):
        raise ApiError(
            400,
            f"continue_final_message goes on with what the assistant said (got a message of {turn['role']!r}"
            "). Let the last message be a text of the assistant's.",
            param="continue_final_message",
        )
    return {**turn, "content": f"{turn['content']}{_END_MARK}"}


def _before_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise ApiError(
            400,
            "The model's chat template does not write the last message as it is. "
            "Leave continue_final_message out.",
            param="continue_final_message",
        )
    return before


def _ids(prompt: Sequence[int]) -> list[int]:
    return list(prompt)


def _turn(message: Message) -> dict[str, object]:
    """Return a message as chat templates know it: text is one text, arguments of calls are objects."""
    turn: dict[str, object] = message.model_dump(exclude_none=True)
    turn["content"] = _joined(message.content)
    if turn["role"] == "developer":  # the API's newer name
        turn["role"] = "system"
    if isinstance(message, AssistantMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _joined(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


def _arguments(text: str) -> dict[str, object]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ApiError(
            400,
            f"The arguments of a tool call are no JSON object (got {text[:80]!r}). Send those of the call.",
            param="messages",
        )
    return found
