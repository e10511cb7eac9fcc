"""Conversations as people store them: OpenAI messages, ShareGPT, prompt and completion, pairs, thumbs.

    messages [, tools]                        OpenAI; tool calls, tool turns, reasoning_content, weight;
                                              the older function_call; refusal; reasoning; thinking
    conversations [, system, tools]           ShareGPT: from, value
    prompt, completion                        texts, or lists of messages
    [prompt,] chosen, rejected                pairs of TRL: texts or messages, the prompt apart or in both;
                                              instruction and input may replace the prompt
    prompt, completion, label                 thumbs of KTO
    instruction, output [, input]             Alpaca; the input follows the instruction after an empty line

All become messages as the server hands them to a template: content as one text, the arguments of calls as
objects, the role `developer` as `system`. What is not a conversation is refused with the reason.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from penstock.core.errors import UsageError
from penstock.text.chat_template import REASONING_KEYS, reasoning_of

ChatKind = Literal["conversations", "pairs", "thumbs"]

FIELDS = (
    "messages",
    "conversations",
    "conversation",
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "label",
    "instruction",
    "input",
    "output",
    "tools",
    "functions",
    "system",
)
"""Fields of a record that are read."""

FORMS = (
    "messages, conversations, prompt and completion, instruction and output (Alpaca), or chosen and rejected"
)
"""Fields that make a record a conversation, for messages."""

Message = dict[str, object]

_TEXTS = ("text", "input_text", "output_text")
_THOUGHTS = ("reasoning", "thinking")
"""Types of parts of a content: what is said, and what an assistant thinks before."""
_CONVERSATIONS = ("messages", "conversations", "conversation")
_CONVERSATIONS_BY_FIELDS = (
    *({name} for name in _CONVERSATIONS),
    {"prompt", "completion"},
    {"instruction", "output"},
)
_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True)
class Side:
    """Conversation with the turns that may be learned."""

    messages: tuple[Message, ...]
    """Messages without weights."""
    learned: frozenset[int]
    """Indices of the assistant turns whose tokens are learned."""
    numbers: tuple[int, ...] = ()
    """Number in the record of each message, if turns were joined. Empty: each counts from 1."""

    def number(self, index: int) -> int:
        """Return the number of a message for errors, from 1, as before turns were joined."""
        return self.numbers[index] if self.numbers else index + 1


@dataclass(frozen=True, slots=True)
class Conversation:
    """One record: a conversation, or the two of a pair."""

    sides: tuple[Side, ...]
    """One, or the chosen and the rejected one of a pair."""
    tools: tuple[object, ...] = ()
    """Functions that the assistant may call."""
    is_rejected: bool = False
    """True for an answer with a thumb down."""
    joined: int = 0
    """Turns that were joined to the one before."""


def kind_of_chat(value: object) -> ChatKind | None:
    """Return what a record is, by its fields; None if it is no conversation.

    >>> kind_of_chat({"prompt": "2+2", "chosen": "4", "rejected": "5"})
    'pairs'
    """
    if not isinstance(value, Mapping):
        return None
    has = {name for name in FIELDS if value.get(name) is not None}
    if {"chosen", "rejected"} <= has:
        return "pairs"
    if {"prompt", "completion", "label"} <= has:
        return "thumbs"
    if any(fields <= has for fields in _CONVERSATIONS_BY_FIELDS):
        return "conversations"
    return None


def conversation_of(
    value: object, *, kind: ChatKind, last_only: bool, join_turns: bool = False
) -> Conversation:
    """Return a record as a conversation.

    Args:
        kind: what the records of the corpus are.
        last_only: True to learn the last assistant turn alone.
        join_turns: True to join consecutive turns of one role.

    Raises:
        UsageError: it is none, or one of another kind; the message says why.
    """
    found = kind_of_chat(value)
    if found is None or not isinstance(value, Mapping):
        names = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
        raise UsageError(
            "The record is no conversation",
            got=names[:120],
            fix=f"It needs {FORMS}.",
        )
    if found != kind:
        raise UsageError(
            f"The record is of the kind {found}, the corpus of the kind {kind}",
            got=", ".join(map(str, value))[:120],
            fix="Prepare each kind as a corpus of its own.",
        )
    tools = tuple(_tools(value.get("tools") or value.get("functions")))
    if kind == "pairs":
        sides = _pair(value)
        if sides[0].messages == sides[1].messages:
            raise UsageError(
                "The chosen and the rejected answer are equal, so neither is preferred",
                got=_shown(sides[0].messages[-1]),
                fix="Correct one of the answers, or leave the pair out.",
            )
    else:
        sides = (_conversation(value),)
    joined = 0
    if join_turns:
        before = sum(len(side.messages) for side in sides)
        sides = tuple(map(_joined, sides))
        joined = before - sum(len(side.messages) for side in sides)
    if last_only:
        sides = tuple(map(_last_turn, sides))
    for side in sides:
        _check_order(side)
    return Conversation(sides, tools, kind == "thumbs" and not _label(value["label"]), joined)


def _conversation(value: Mapping[str, object]) -> Side:
    """Return the one conversation of a record.

    Raises:
        UsageError: it is in several forms at once.
    """
    has = {name for name in FIELDS if value.get(name) is not None}
    forms = [" and ".join(sorted(fields)) for fields in _CONVERSATIONS_BY_FIELDS if fields <= has]
    if len(forms) > 1:
        raise UsageError(
            f"The record is a conversation in {len(forms)} forms",
            got="; ".join(forms),
            fix="Leave one of them in the record.",
        )
    if "completion" in has and "prompt" in has:
        prompt, answer = _question(value), value["completion"]
    elif "output" in has and "instruction" in has:
        prompt, answer = _turns(_instruction(value), "user"), value["output"]
    else:
        (turns,) = (value[name] for name in _CONVERSATIONS if name in has)
        return _side(_with_system(value, _messages(turns)), 0)
    return _answered(_with_system(value, prompt), _turns(answer, "assistant"))


def _question(value: Mapping[str, object]) -> list[Message]:
    """Return the messages of a record's prompt, or of its instruction and input.

    Raises:
        UsageError: a prompt has an instruction or an input beside it that it does not contain.
    """
    if value.get("prompt") is None:
        return _turns(_instruction(value), "user")
    prompt = _turns(value["prompt"], "user")
    for name in ("instruction", "input"):
        text = "" if (given := value.get(name)) is None else str(given).strip()
        if not any(text in str(message["content"]) for message in prompt):
            raise UsageError(
                f"The record has a prompt, so its {name} would be lost",
                got=text[:80],
                fix=f"Write the {name} into the prompt, or give an instruction in place of the prompt.",
            )
    return prompt


def _instruction(value: Mapping[str, object]) -> str:
    """Return the question of a record of Alpaca: its instruction, and its input after an empty line.

    >>> _instruction({"instruction": "Translate.", "input": "Haus"})
    'Translate.\\n\\nHaus'
    """
    texts = ["" if (text := value.get(name)) is None else text for name in ("instruction", "input")]
    for name, text in zip(("instruction", "input"), texts, strict=True):
        if not isinstance(text, str):
            raise UsageError(f"The {name} is not text", got=str(text)[:80], fix="Write it as one text.")
    if not (question := "\n\n".join(str(text) for text in texts if str(text).strip())):
        raise UsageError(
            "The instruction is empty, and there is no input",
            got=texts[0],
            fix="Write the question, or leave the record out.",
        )
    return question


def _with_system(value: Mapping[str, object], messages: list[Message]) -> list[Message]:
    """Return messages behind the record's system text, unless they begin with one."""
    if not (system := value.get("system")) or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": str(system)}, *messages]


def _label(value: object) -> bool:
    known = value.strip().lower() if isinstance(value, str) else value  # of CSV
    if known in (True, False, 0, 1):
        return bool(known)
    if known in ("true", "false", "1", "0"):
        return known in ("true", "1")
    raise UsageError(
        "The label is neither true nor false",
        got=value,
        fix="Write true for an answer that is wanted, false for another.",
    )


def _pair(value: Mapping[str, object]) -> tuple[Side, ...]:
    chosen, rejected = (_turns(value[name], "assistant") for name in ("chosen", "rejected"))
    answers_instruction = value.get("instruction") is not None and chosen[0]["role"] == "assistant"
    if value.get("prompt") is not None or answers_instruction:
        prompt = _question(value)
        if all(each[: len(prompt)] == prompt for each in (chosen, rejected)):  # it stands in both as well
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        if isinstance(value["chosen"], str):
            raise UsageError(
                "The pair has texts without a prompt",
                got=value["chosen"][:60],
                fix="Give the prompt in a field of its own, or both sides as lists of messages.",
            )
        same = 0
        while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
            same += 1
        # A turn of the assistant that both begin with is an answer, unless something follows it in both.
        same = min(same, len(chosen) - 1, len(rejected) - 1)
        prompt, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
        if not prompt or not chosen[0]["role"] == rejected[0]["role"] == "assistant":
            raise UsageError(
                "The chosen and the rejected side answer different prompts",
                got=f"{_shown(chosen[0])} | {_shown(rejected[0])}",
                fix="Give both the same messages before their answers, or leave the pair out.",
            )
    prompt = _with_system(value, prompt)
    return _answered(prompt, chosen), _answered(prompt, rejected)


def _answered(prompt: list[Message], answer: list[Message]) -> Side:
    return _side([*prompt, *answer], len(prompt))


def _turns(value: object, role: str) -> list[Message]:
    """Return a text as one message of a role, a message or a list of them as a list."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return _messages([value] if isinstance(value, Mapping) else value)


def _messages(value: object) -> list[Message]:
    if isinstance(value, str):  # JSON in a column of text
        value = _json(value, "The messages")
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise UsageError(
            "The record has no list of messages",
            got=str(value)[:80],
            fix='Write it as [{"role": "user", "content": "..."}, ...].',
        )
    return [_message(each, index + 1) for index, each in enumerate(value)]


def _message(value: object, number: int) -> Message:
    if not isinstance(value, Mapping):
        raise UsageError(
            f"Message {number} is no object",
            got=str(value)[:80],
            fix='Write it as {"role": "user", "content": "..."}.',
        )
    given = {name: each for name, each in value.items() if each is not None}
    said = given.pop("role", given.pop("from", None))
    role = _ROLES.get(str(said).lower())
    if role is None:
        raise UsageError(
            f"Message {number} has an unknown role", got=said, fix=f"Known: {', '.join(_ROLES)}."
        )
    if role == "assistant":
        _rename_keys(given, number)
    content = given.pop("content", given.pop("value", None))
    calls = given.pop("tool_calls", None)
    if isinstance(calls, str):  # JSON in a column of text
        calls = _json(calls, f"The calls of message {number}") if calls.strip() else None
    if str(said).lower() == "function_call":
        calls, content = [content], None
    message: Message = {**given, "role": role, "content": _text(content, number)}
    if calls:
        if role != "assistant" or not isinstance(calls, Sequence):
            raise UsageError(
                f"Message {number} has tool calls, but is none of the assistant",
                got=role,
                fix="Only the assistant calls tools: correct the role, and write tool_calls as a list.",
            )
        message["tool_calls"] = [_call(call, number) for call in calls]
    elif content is None and role == "assistant" and not given.get("reasoning_content"):
        raise UsageError(
            f"Message {number} of the assistant has neither content nor tool calls",
            got=", ".join(map(str, value)),
            fix='Give one of them, or an empty "content" for an empty answer.',
        )
    return message


def _rename_keys(message: Message, number: int) -> None:
    """Give the keys of an assistant turn the names that templates know.

    Raises:
        UsageError: it has different reasoning in two places, or reasoning that is not text.
    """
    if not message.get("tool_calls") and (call := message.pop("function_call", None)):
        message["tool_calls"] = [call]
    if not (message.get("content") or message.get("value")) and "refusal" in message:
        message["content"] = message.pop("refusal")
    key = "content" if "content" in message else "value"
    thought, message[key] = _thought_apart(message.get(key), number)
    try:
        found = reasoning_of(message)
    except UsageError as error:
        raise UsageError(f"Message {number} has{str(error).removeprefix('A message has')}") from None
    if thought.strip():
        if found and found != thought:
            raise UsageError(
                f"Message {number} has different reasoning in its content and under a key",
                got=[thought[:60], found[:60]],
                fix="Both mean one thing: leave one.",
            )
        found = thought
    for name in REASONING_KEYS:
        message.pop(name, None)
    if found is not None:
        message["reasoning_content"] = found


def _thought_apart(content: object, number: int) -> tuple[str, object]:
    """Return the reasoning at the beginning of an answer's content, and the rest.

    Raises:
        UsageError: reasoning stands behind text, where no template can write it, or is not text.
    """
    if not isinstance(content, Sequence) or isinstance(content, str):
        return "", content
    parts = list(content)
    is_thought = [isinstance(part, Mapping) and part.get("type") in _THOUGHTS for part in parts]
    first = next((i for i, one in enumerate(is_thought) if not one), len(parts))
    if any(is_thought[first:]):
        raise UsageError(
            f"Message {number} has reasoning behind its text",
            got=str(parts[is_thought.index(True, first)])[:80],
            fix="Templates write it before the text: put it first, or leave the conversation out.",
        )
    thoughts = [part.get("text", part.get(part["type"])) for part in parts[:first]]
    if any(thought is None for thought in thoughts):
        raise UsageError(
            f"Message {number} has reasoning that is not text",
            got=str(parts[thoughts.index(None)])[:80],
            fix="Write it as one text, or leave it out.",
        )
    return "".join(_text(thought, number) for thought in thoughts), parts[first:] or ""


def _text(content: object, number: int) -> str:
    """Return the content of a message as one text; parts of text are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [_text_of_part(part) for part in parts]
    if all(isinstance(text, str) for text in texts):
        return "".join(str(text) for text in texts)
    raise UsageError(
        f"Message {number} has content that is not text",
        got=str(content)[:80],
        fix=f"Parts of the types {', '.join(_TEXTS)} are trained on: leave the conversation out.",
    )


def _text_of_part(part: object) -> object:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "refusal":
        return part.get("refusal")
    return part.get("text") if part.get("type", "text") in _TEXTS else None


def _call(value: object, number: int) -> Message:
    if isinstance(value, str):  # JSON in a column of text, or of ShareGPT
        value = _json(value, f"The call of message {number}")
    call = dict(value) if isinstance(value, Mapping) else {}
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            f"A tool call of message {number} names no function",
            got=str(value)[:80],
            fix='Write it as {"function": {"name": "...", "arguments": {...}}}.',
        )
    arguments = function.get("arguments", function.get("parameters"))
    if arguments is None or arguments == "":
        arguments = {}
    if isinstance(arguments, str):
        arguments = _json(arguments, f"The arguments of a tool call of message {number}")
    if not isinstance(arguments, Mapping):
        raise UsageError(
            f"The arguments of a tool call of message {number} are no JSON object",
            got=str(arguments)[:80],
            fix='Write them by name, as {"place": "Rome"}.',
        )
    made: Message = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **made} if call.get("id") is not None else made


def _tools(value: object) -> Sequence[Message]:
    if isinstance(value, str):
        value = _json(value, "The tools") if value.strip() else []
    if value is None:
        return ()
    if not isinstance(value, Sequence):
        raise UsageError(
            "The tools are no list", got=str(value)[:80], fix="Write them as OpenAI's API has them."
        )
    return [_tool(_json(tool, "A tool") if isinstance(tool, str) else tool) for tool in value]


def _tool(value: object) -> Message:
    tool = dict(value) if isinstance(value, Mapping) else {}
    if "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(
            "A tool names no function",
            got=str(value)[:80],
            fix='Write it as {"type": "function", "function": {"name": "...", "parameters": {...}}}.',
        )
    return tool


def without_nulls(value: Any) -> Any:  # Any: JSON values
    """Return a row of Parquet without nulls: it has a value for every key that any row has.

    >>> without_nulls({"role": "user", "tool_calls": None})
    {'role': 'user'}
    """
    if isinstance(value, Mapping):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _json(text: object, what: str) -> Any:  # Any: JSON values
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError):
        raise UsageError(
            f"{what} must be JSON", got=str(text)[:80], fix="Correct them, or leave the conversation out."
        ) from None


def _side(messages: list[Message], first: int) -> Side:
    """Return messages and the assistant turns from `first` on whose weight is not 0."""
    learned, plain = set(), []
    for index, message in enumerate(messages):
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise UsageError(
                f"Message {index + 1} has a weight that is neither 0 nor 1",
                got=weight,
                fix="Write 0 for a turn that is not learned, and 1 or nothing for one that is.",
            )
        if message["role"] == "assistant" and index >= first and weight:
            learned.add(index)
        plain.append({name: value for name, value in message.items() if name != "weight"})
    if not learned:
        raise UsageError(
            "The conversation has no turn of the assistant to learn",
            got=", ".join(map(_role_and_weight, messages))[:80],
            fix="Add an answer, take its weight of 0 away, or leave the conversation out.",
        )
    return Side(tuple(plain), frozenset(learned))


def _last_turn(side: Side) -> Side:
    """Return a conversation of which the assistant's last turn alone is learned.

    Raises:
        UsageError: the weight of that turn is 0.
    """
    last = max(index for index, message in enumerate(side.messages) if message["role"] == "assistant")
    if last in side.learned:
        return Side(side.messages, frozenset({last}), side.numbers)
    raise UsageError(
        "Only the last turn of the assistant is to be learned, and "
        f"message {side.number(last)} has a weight of 0",
        got=_shown(side.messages[last]),
        fix="Take the weight away, leave the conversation out, or learn all turns with --train-on "
        "all_assistant.",
    )


_JOINED_ROLES = ("system", "user", "assistant")
_JOINED_KEYS = {"role", "content", "tool_calls", "reasoning_content"}
"""Keys of turns that can be joined; any other must be equal in both."""


def _joined(side: Side) -> Side:
    """Return a conversation with consecutive turns of one role as one; calls and results of tools stay apart.

    Raises:
        UsageError: two of them cannot be one turn.
    """
    messages: list[Message] = []
    learned, numbers = set[int](), list[int]()
    for index, message in enumerate(side.messages):
        is_learned = index in side.learned
        if not messages or message["role"] != messages[-1]["role"] or message["role"] not in _JOINED_ROLES:
            messages.append(message)
            numbers.append(index + 1)
        elif is_learned != (len(messages) - 1 in learned):
            raise _cannot_join(index, message, "one is learned, the other is not")
        else:
            messages[-1] = _join(messages[-1], message, index)
        if is_learned:
            learned.add(len(messages) - 1)
    return Side(tuple(messages), frozenset(learned), tuple(numbers))


def _join(first: Message, second: Message, index: int) -> Message:
    if first.get("tool_calls") and second["content"]:
        raise _cannot_join(index, second, "its text would stand before the calls of the first")
    if second.get("reasoning_content") and (first["content"] or first.get("tool_calls")):
        raise _cannot_join(index, second, "its reasoning would stand before the text of the first")
    if any(first.get(key) != second.get(key) for key in (first.keys() | second.keys()) - _JOINED_KEYS):
        raise _cannot_join(index, second, "they have different keys")
    joined: Message = {**first, "content": _as_one(first["content"], second["content"])}
    if thought := _as_one(first.get("reasoning_content"), second.get("reasoning_content")):
        joined["reasoning_content"] = thought
    calls = [call for one in (first, second) for call in cast("Sequence[object]", one.get("tool_calls", ()))]
    return {**joined, "tool_calls": calls} if calls else joined


def _as_one(*texts: object) -> str:
    return "\n\n".join(str(text) for text in texts if text)


def _cannot_join(index: int, message: Message, why: str) -> UsageError:
    return UsageError(
        f"Messages {index} and {index + 1} are of the role {message['role']} and cannot be joined: {why}",
        got=_shown(message),
        fix="Join them in the file, or leave the conversation out.",
    )


def _role_and_weight(message: Message) -> str:
    """Return a message's role for an error, and its weight if it has one.

    >>> _role_and_weight({"role": "assistant", "content": "Hi", "weight": 0})
    'assistant (weight 0)'
    """
    weight = message.get("weight")
    return str(message["role"]) if weight is None else f"{message['role']} (weight {weight})"


def _shown(message: Message) -> str:
    """Return the text or the calls of a message for an error."""
    return str(message["content"] or message.get("tool_calls", ""))[:60]


def _check_order(side: Side) -> None:
    """Refuse roles out of order.

    Raises:
        UsageError: with the two roles.
    """
    before: Message = {"role": "start"}
    for index, message in enumerate(side.messages):
        role, last = message["role"], before["role"]
        called = last == "tool" or bool(before.get("tool_calls"))
        wrong = (
            (role == "system" and index > 0)
            or (role == "tool" and not called)
            or (role in ("user", "assistant") and role == last)
        )
        if wrong:
            join = "" if side.numbers else "join such messages, as --join-turns does, or "
            raise UsageError(
                f"Roles are out of order: message {side.number(index)} is of the role {role}, after {last}",
                got=_shown(message),
                fix="The system comes first, a tool after a call, and no role speaks twice in a row: "
                f"{join}leave the conversation out.",
            )
        before = message
