"""Prompts: texts and conversations to token ids. Slow for long ones, so routes run this in a thread."""

import json
from collections.abc import Callable, Sequence
from typing import Literal

from penstock.serve.errors import ApiError, too_long
from penstock.serve.schema.base import ANY_JSON
from penstock.serve.schema.chat import AssistantMessage, ChatRequest, Content, Message, TokenizeRequest, Tool
from penstock.serve.schema.completions import Prompt
from penstock.serve.state import ModelInfo

Ending = Literal["asks", "stops", "goes_on"]

_END_MARK = "\ufdd2\ufdd3"
"""Marks the end of the last message in a rendered template: code points that Unicode reserves as unused."""
_MAX_TRUNCATED_CONTEXTS = 32
"""Maximum length of a text that is truncated, in contexts: all of it is encoded first."""


def prompts_of(
    prompt: Prompt,
    served: ModelInfo,
    *,
    max_prompts: int,
    param: str,
    truncates: bool,
    encode: Callable[[str], list[int]],
) -> list[list[int]]:
    """Return the token ids of each prompt of a request.

    Args:
        encode: text -> ids.
        param: key of the request, for error messages.
        truncates: True: accept texts of several contexts, because the prompt is truncated afterwards.

    Raises:
        ApiError: too many prompts, or none.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if not prompt:
        raise ApiError(f"{param} is an empty list. Give at least one text.", param=param)
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    if len(prompt) > max_prompts:
        raise ApiError(f"{param} has {len(prompt):,} entries, and the limit is {max_prompts:,}.", param=param)
    return [
        encoded(one, served, encode, param=param, truncates=truncates) if isinstance(one, str) else list(one)
        for one in prompt
    ]


def encoded(
    text: str,
    served: ModelInfo,
    encode: Callable[[str], list[int]],
    *,
    param: str,
    truncates: bool = False,
) -> list[int]:
    """Return the token ids of a text.

    Args:
        truncates: True: accept several contexts, because the prompt is truncated afterwards.

    Raises:
        ApiError: the text is longer than any text that fits the context; encoding it would take seconds.
    """
    tokenizer = served.text_processor.tokenizer
    room = served.context * (_MAX_TRUNCATED_CONTEXTS if truncates else 1)
    if tokenizer.exceeds(text, room):
        size, most = len(text.encode()), (tokenizer.longest_token_bytes or 0) * room
        why = f"{param} has {size:,} bytes; {room:,} tokens hold at most {most:,}. Shorten it."
        raise too_long(served.context, why, param=param)
    return encode(text)


def chat_prompt(
    messages: Sequence[Message],
    served: ModelInfo,
    *,
    tools: Sequence[Tool] = (),
    variables: dict[str, ANY_JSON] | None = None,
    ending: Ending = "asks",
    truncates: bool = False,
) -> list[int]:
    """Return the token ids of a conversation.

    Args:
        ending: "asks": with the start of an answer; "stops": after the last turn; "goes_on": within the
            last turn, at the end of its text.
        truncates: True: accept several contexts, because the prompt is truncated afterwards.

    Raises:
        ApiError: the arguments of a tool call are not a JSON object.
        UsageError: the model's chat template refuses these messages.
        ModelError: the template fails.
    """
    text_processor = served.text_processor
    turns = [_turn(message) for message in messages]
    if ending == "goes_on":
        turns[-1] = _marked(turns[-1])
    text = served.templates.render(
        text_processor.guarded(turns),
        tools=text_processor.guarded([tool.model_dump(exclude_none=True) for tool in tools]),
        variables=text_processor.guarded(variables),
        add_generation_prompt=ending == "asks",
    )
    text = _before_mark(text) if ending == "goes_on" else text
    encode = text_processor.encode_rendered
    return encoded(text, served, encode, param="messages", truncates=truncates)


def ending_of(body: ChatRequest | TokenizeRequest) -> Ending:
    """Return where the prompt of a conversation ends.

    Raises:
        ApiError: continue_final_message and add_generation_prompt are both true.
    """
    if not body.continue_final_message:
        return "stops" if body.add_generation_prompt is False else "asks"
    if body.add_generation_prompt:
        raise ApiError(
            "An answer continues the final message or begins one, not both. "
            "Give add_generation_prompt: false.",
            param="add_generation_prompt",
        )
    return "goes_on"


def echo_of(body: ChatRequest) -> str:
    """Return the text to echo before an answer: the last message, if echo is on and it is the assistant's."""
    last = body.messages[-1]
    return _joined(last.content) if body.echo and isinstance(last, AssistantMessage) else ""


def _marked(turn: dict[str, object]) -> dict[str, object]:
    if turn["role"] != "assistant" or turn.get("tool_calls"):
        raise ApiError(
            f"continue_final_message needs an assistant message at the end (got a message of {turn['role']!r}"
            "). Let the last message be a text of the assistant.",
            param="continue_final_message",
        )
    return {**turn, "content": f"{turn['content']}{_END_MARK}"}


def _before_mark(text: str) -> str:
    before, mark, _ = text.rpartition(_END_MARK)
    if not mark:
        raise ApiError(
            "The model's chat template changes the text of the last message. "
            "Leave continue_final_message out.",
            param="continue_final_message",
        )
    return before


def _turn(message: Message) -> dict[str, object]:
    """Return a message as chat templates expect it: content as one text, call arguments as objects."""
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
            f"The arguments of a tool call are not a JSON object (got {text[:80]!r}). Send one.",
            param="messages",
        )
    return found
