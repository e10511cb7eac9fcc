"""Chat templates: messages to the text that a model was trained to continue, or a plain transcript.

Templates are Jinja programs by the model's publisher, so they run in jinja2's sandbox, which prevents changes
to their inputs. A model without a template gets this transcript, in which an empty line follows every message
but the last:

    System: Answer briefly.

    User: What is a penstock?

    Assistant:
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn, TypedDict

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.core.clock import utc_now
from penstock.core.config import load_json
from penstock.core.errors import ConfigError, ModelError, UsageError

_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}

TEMPLATE_FILES = (*_FILES.values(), "tokenizer_config.json")
"""Files of a folder that `load_template` reads."""


REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's turn that mean its reasoning, in the order in which transformers looks for it."""

Messages = Sequence[Mapping[str, object]]
"""A conversation as templates get it."""


class Message(TypedDict):
    """Message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """Chat template of a model."""

    source: str | None = None
    """Jinja source; None: the plain transcript."""
    tool_source: str | None = None
    """Jinja source used if tools are given; None: `source`."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by the variable name that the template may use, such as `bos_token`."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Texts that end a plain transcript's answer; with a template the model ends with a token instead."""
        return () if self.source is not None else ("\nUser:", "\nSystem:")


def load_template(folder: Path | str) -> ChatTemplate:
    """Read the templates in a folder's files or in `tokenizer_config.json`; a plain one if there are none.

    Raises:
        ModelError: one of them cannot be read.
    """
    folder = Path(folder)
    path, config = folder / "tokenizer_config.json", {}
    if path.is_file():
        try:
            config = load_json(path)
        except ConfigError as error:
            raise ModelError(str(error).removesuffix(".")) from None
    named = _named(config.get("chat_template"))
    for name, file in _FILES.items():
        if (folder / file).is_file():
            named[name] = read_template(folder / file)
    tokens = {name: _token(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return ChatTemplate(
        source=named.get("default", named.get("tool_use")),
        tool_source=named.get("tool_use"),
        variables={n: text for n, text in tokens.items() if text is not None},
    )


def render(
    messages: Sequence[Mapping[str, object]],
    template: ChatTemplate,
    *,
    tools: Sequence[object] = (),
    variables: Mapping[str, object] | None = None,
    add_generation_prompt: bool = True,
    marked: bool = False,
    date: str | None = None,
) -> str:
    """Return the prompt text for the model's next answer.

    Args:
        messages: as `Message`; with a template also its own roles and keys, such as "tool" and `tool_calls`.
            The template finds reasoning under each of REASONING_KEYS, whichever it was given under.
        tools: functions the model may call, as JSON; they require a template.
        variables: more template variables, such as `enable_thinking`.
        add_generation_prompt: True to end with the beginning of an answer; False: the conversation alone.
        marked: True to put ANSWER_MARKS around what the template writes within `{% generation %}`.
        date: day that the template is told, YYYY-MM-DD; None: today.

    Raises:
        UsageError: the template rejects these messages, or there are none; one has different reasoning under
            two keys; or `variables` make it fail.
        ModelError: the template is invalid.

    >>> render([{"role": "user", "content": "Hi"}], ChatTemplate())
    'User: Hi\\n\\nAssistant:'
    """
    if not messages:
        raise UsageError("There is no message to answer", fix="Give at least one.")
    for message in messages:
        _check_message(message)
    source = template.tool_source or template.source if tools else template.source
    if source is None:
        return _transcript(messages, has_tools=bool(tools), add_generation_prompt=add_generation_prompt)
    known: dict[str, object] = {
        "messages": [_with_reasoning(message) for message in messages],
        "add_generation_prompt": add_generation_prompt,
        "tools": list(tools) or None,
    }
    known = {**template.variables, **known}
    defaults = {"documents": None}  # as in transformers; templates for retrieval test it
    if date is not None:
        known["strftime_now"] = datetime.fromisoformat(date).strftime
    try:
        return _compiled(source, marked).render({**defaults, **(variables or {}), **known})
    except _RefusedMessages as refusal:
        raise UsageError(f"The model's chat template refuses these messages: {refusal}") from None
    except _FAILURES as error:
        given = {name: value for name, value in (variables or {}).items() if name in source}
        if given and not _fails_so(error, source, {**defaults, **known}):
            names = ", ".join(f"{name} ({type(value).__name__})" for name, value in given.items())
            fix = "Send what the template expects, or leave them out."
            raise UsageError(
                f"The chat template fails with the variables {names}: {error}", fix=fix
            ) from None
        fix = _OWN_BODY if isinstance(error, SyntaxError) and "loop" in str(error) else ""
        raise ModelError(f"The model's chat template fails: {error}", fix=fix) from error


def _fails_so(error: Exception, source: str, known: Mapping[str, object]) -> bool:
    """Return True if a template fails in the same way without the caller's variables."""
    try:
        _compiled(source, False).render(known)
    except _RefusedMessages:
        return False
    except _FAILURES as other:
        return repr(other) == repr(error)
    return False


def _check_message(message: object) -> None:
    fix = 'Write each as {"role": "user", "content": "..."}.'
    if not isinstance(message, Mapping):
        raise UsageError("A conversation must be a list of messages", got=message, fix=fix)
    if not isinstance(message.get("role"), str):
        raise UsageError("A message has no role", got=message, fix=fix)
    is_call = message.get("content") is None and bool(message.get("tool_calls"))
    if not is_call and not isinstance(message.get("content"), str):
        raise UsageError("The content of a message is not text", got=message, fix=fix)


def _with_reasoning(message: Mapping[str, object]) -> Mapping[str, object]:
    """Return a message that has its reasoning under all names of it.

    >>> _with_reasoning({"role": "assistant", "thinking": "Why."})["reasoning_content"]
    'Why.'
    """
    reasoning = reasoning_of(message)
    return message if reasoning is None else {**message, **dict.fromkeys(REASONING_KEYS, reasoning)}


def reasoning_of(message: Mapping[str, object]) -> str | None:
    """Return the reasoning of a message, under whichever key; an empty one counts only if there is no other.

    Raises:
        UsageError: two keys have different reasoning, or it is not text.

    >>> reasoning_of({"reasoning_content": "", "reasoning": "Why."})
    'Why.'
    """
    given = {key: message[key] for key in REASONING_KEYS if message.get(key) or message.get(key) == ""}
    if wrong := [value for value in given.values() if not isinstance(value, str)]:
        raise UsageError(
            "A message has reasoning that is not text",
            got=str(wrong[0])[:80],
            fix="Write it as one text, or leave it out.",
        )
    texts = {key: str(value) for key, value in given.items()}
    filled = {key: text for key, text in texts.items() if text.strip()}
    first = next(iter((filled or texts).values()), None)
    if any(value != first for value in filled.values()):
        raise UsageError(
            f"A message has different reasoning under {' and '.join(filled)}",
            got=[str(value)[:60] for value in filled.values()],
            fix="The keys mean one thing: leave one.",
        )
    return first


def _transcript(
    messages: Sequence[Mapping[str, object]], *, has_tools: bool, add_generation_prompt: bool
) -> str:
    roles = {str(message["role"]) for message in messages}
    if unknown := roles - {"system", "user", "assistant"}:
        raise UsageError(
            "The model has no chat template, so it has no roles but system, user and assistant",
            got=min(unknown),
            fix="Correct the role, or use a model whose template has it.",
        )
    if has_tools:
        raise UsageError(
            "The model has no chat template, so it cannot use tools",
            fix="Use a model that was tuned to call tools.",
        )
    turns = [
        f"{str(message['role']).capitalize()}: {str(message.get('content') or '').strip()}"
        for message in messages
    ]
    return "\n\n".join([*turns, "Assistant:"] if add_generation_prompt else turns)


def read_template(path: Path) -> str:
    """Read a template's file.

    Raises:
        ModelError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}", fix="Restore it.") from None


def _named(stored: Any) -> dict[str, str]:  # Any: JSON; a text, or a list of named texts
    if isinstance(stored, list):
        named = {entry.get("name"): entry.get("template") for entry in stored if isinstance(entry, dict)}
    else:
        named = {"default": stored}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


def _token(stored: Any) -> str | None:  # Any: JSON; a text, or an object with the text
    if isinstance(stored, dict):
        stored = stored.get("content")
    return stored if isinstance(stored, str) else None


_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
    *(SyntaxError, RecursionError),
)
"""What a template raises that cannot be rendered. AttributeError comes from filters such as `dictsort`;
SyntaxError from Python, into which Jinja translates a template, for a `{% break %}` outside a loop."""

_OWN_BODY = (
    "Let {% break %} and {% continue %} stand in their loop: {% generation %}, {% call %} and {% macro %} "
    "between them and the loop are bodies of their own, in transformers too."
)


class _RefusedMessages(Exception):
    """Raised inside a template that rejects the messages."""


MARK = "\ufdd6\ufdd7"
"""Stands in place of a text that is looked for, or behind it: code points that Unicode reserves as unused."""

ANSWER_MARKS = "\ufdd4\ufdd5"
"""Begin and end of a `{% generation %}` block: code points that Unicode reserves as unused."""


class _Generation(Extension):
    """Jinja extension that accepts `{% generation %}`, a training mark of answers.

    The block is the body of a call, as in transformers: what is set inside is unknown outside, and
    `{% break %}` and `{% continue %}` do not reach a loop outside.
    """

    tags = {"generation"}  # noqa: RUF012, as jinja2 declares it

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("written"), [], [], body).set_lineno(line)

    def written(self, caller: Callable[[], str]) -> str:
        """Return what the block writes."""
        return caller()


class _MarkedGeneration(_Generation):
    """The same, with a mark written at both ends of the block."""

    def written(self, caller: Callable[[], str]) -> str:
        """Return what the block writes, between its marks."""
        return caller().join(ANSWER_MARKS)


@lru_cache(maxsize=4)
def _compiled(source: str, marked: bool) -> jinja2.Template:
    return _environment(_MarkedGeneration if marked else _Generation).from_string(source)


def _environment(generation: type[Extension]) -> ImmutableSandboxedEnvironment:
    # settings, names and filters that templates on the Hub expect
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: Any,  # Any: what the template holds
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(reason: str) -> NoReturn:
    raise _RefusedMessages(reason)


def _now(form: str) -> str:
    return datetime.fromisoformat(utc_now()).strftime(form)
