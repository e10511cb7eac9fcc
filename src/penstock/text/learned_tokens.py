"""Answers in a rendered conversation: which characters of the text an assistant's turns are.

Published templates do not say which part of their text is the assistant's; few have `{% generation %}` tags.
So each assistant turn is replaced by a mark, the conversation is rendered again, and the two texts compared:

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nMARK<|im_end|>\\n
                                                            ^^^^^^ the answer

The texts agree up to the answer, and what follows the mark follows the answer. An answer begins where the
generation prompt ends (so an empty thinking block that the template inserts is learned: the model must write
it), and ends with the end-of-turn tokens: control tokens in a row that follow the last answer of a
conversation too, so not the header of the next turn. White space after a token is not the answer's. If later
turns are written differently without this one, or cannot be written at all, the conversation up to this turn
is compared instead, and its text is looked up in the whole, behind the generation prompt.

Tags are compared with what was found: whether they hold a header, white space or control tokens does not
matter; any other difference is refused. Nothing is learned because a guess failed.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from penstock.core.errors import PenstockError, UsageError
from penstock.text.chat_template import ANSWER_MARKS

MARK = "\ufdd6\ufdd7"
"""Stands in place of an answer: code points that Unicode reserves as unused."""

_NUMBER_OR_WORD = re.compile(r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)|\w+)")

_SPACE = re.compile(r"\s*")

_NO_OTHER_TEXT = ("role", "content", "tool_calls", "name", "id", "type")
"""Keys of an assistant turn that hold no text, or one that is looked for by itself."""

Messages = Sequence[Mapping[str, object]]
Span = tuple[int, int]
"""First and past-the-last character."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text of one assistant turn."""

    message: int
    """Index of the turn among the messages."""
    spans: tuple[Span, ...]
    """Its characters, ascending; an end-of-turn token is the last."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """Rendered conversation."""

    text: str
    answers: tuple[Answer, ...]
    """Assistant turns in order."""
    dropped: int
    """Turns of which the template left out something on purpose, such as reasoning of earlier turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Renderer:
    """One template with the settings that conversations are rendered with."""

    render: Callable[..., str]
    """As `chat_template.render`, with the template given."""
    control: re.Pattern[str]
    """Names of the tokenizer's control tokens."""
    has_tags: bool
    """True if the template has `{% generation %}` tags."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """Text and tokens that a template writes around an answer."""

    prompt: str
    """Generation prompt; "" if unknown."""
    ends: Collection[tuple[str, ...]]
    """Rows of tokens that end a turn, and their beginnings."""
    control: re.Pattern[str]
    """Names of the tokenizer's control tokens."""


def find_answers(messages: Messages, tools: Sequence[object], renderer: Renderer) -> RenderedChat:
    """Render a conversation and find its assistant turns.

    Args:
        messages: guarded from names of control tokens (see special_tokens.py).

    Raises:
        UsageError: the template refuses the messages or drops one, a turn cannot be found, or the tags
            disagree.
        ModelError: the template fails.
    """
    given = json.dumps([list(messages), list(tools)], ensure_ascii=False)
    if found := next((letter for letter in (*MARK, *ANSWER_MARKS) if letter in given), None):
        raise UsageError("A message has a code point that marks answers here", got=f"U+{ord(found):04X}")
    render = _with(renderer.render, tools)
    text = render(messages)
    _check_tools(tools, text)
    _check_kept(messages, render)
    prompt = _generation_prompt(renderer)
    frame = _Frame(prompt, _ends(renderer, tools, prompt), renderer.control)
    marked = None
    if renderer.has_tags:
        marked = _tagged(_with(partial(renderer.render, marked=True), tools), messages, text)
    answers: list[Answer] = []
    turns: list[Span] = []
    before = dropped = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content, stop, ends = _located(messages, index, text, before, render, frame)
        (_, end), *more = ends
        at = _header_start(text, before, content, prompt)
        start = min(at + len(prompt), content)
        dropped += _dropped(message, text[start:stop], index)
        learned: tuple[Span, ...] = ((start, end),)
        if marked is not None:
            learned = _within_tags(marked, (start, end), (content, stop), text, index)
        answers.append(Answer(index, (*learned, *more)))
        _, before = ends[-1]
        turns.append((at, before))
    if marked is not None:
        _check_rest_of_tags(marked, turns, text, renderer.control)
    return RenderedChat(text, tuple(answers), dropped)


Render = Callable[[Messages], str]


def _with(render: Callable[..., str], tools: Sequence[object]) -> Render:
    return lambda messages: render(messages, tools=tools, add_generation_prompt=False)


def _located(
    messages: Messages, index: int, text: str, before: int, render: Render, frame: _Frame
) -> tuple[int, int, Sequence[Span]]:
    """Return where a turn's content starts and stops, and its end-of-turn tokens.

    Args:
        before: end of the previous answer.

    Raises:
        UsageError: the turn or its end cannot be found.
    """
    mark, control = {"role": "assistant", "content": MARK}, frame.control
    try:
        other = render([*messages[:index], mark, *messages[index + 1 :]])
    except UsageError:  # the template wants the tool results to follow a call, for example
        other = ""
    head, is_there, tail = other.partition(MARK)
    stop = len(text) - len(tail)
    if is_there and text.endswith(tail) and (first := _common(text, head)) >= before and first <= stop:
        first = _before_token(text, first, control)
        if ends := _ends_at(text, stop, frame):
            return first, stop, ends
        raise UsageError(
            "The template writes no end-of-turn token of the vocabulary after the answer, message "
            f"{index + 1}, so the model would not learn to stop",
            got=tail[:40],
            fix="Use the tokenizer and the template of one model, and a template that ends every answer "
            "alike, be it the last one or not.",
        )
    alone = render(messages[: index + 1]).removesuffix(frame.prompt).rstrip()
    head, is_there, _ = render([*messages[:index], mark]).partition(MARK)
    first = _before_token(alone, _common(alone, head), control)
    turn = alone[first:]
    tokens = list(control.finditer(turn))
    # With its header: the text of a user may be the same. What the template put in between, such as an empty
    # thinking block, may be missing from an earlier turn.
    header = alone[_header_start(alone, 0, first, frame.prompt) : first]
    headers = {header or frame.prompt, frame.prompt}
    written = f"(?:{'|'.join(map(re.escape, headers))}){re.escape(turn)}"
    found = re.compile(written).search(text, before)
    if not is_there or not found or not tokens or tokens[-1].end() != len(turn):
        raise UsageError(
            f"The assistant's turn, message {index + 1}, cannot be found in the text of the template",
            fix="Correct the template, or leave the conversation out.",
        )
    start = found.end() - len(turn)
    stop = start + tokens[-1].start()
    return start, stop, [(stop, found.end())]


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts.

    >>> _common("abcd", "abx"), _common("", "a")
    (2, 0)
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _before_token(text: str, at: int, control: re.Pattern[str]) -> int:
    """Return a position, moved to the start of the control token that it is inside of."""
    for found in control.finditer(text, max(0, at - 64), at + 64):
        if found.start() < at < found.end():
            return found.start()
    return at


def _row_of_tokens(text: str, at: int, control: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the control tokens in a row from a position, white space left out."""
    while (space := _SPACE.match(text, at)) and (token := control.match(text, space.end())):
        yield token
        at = token.end()


def _ends_at(text: str, at: int, frame: _Frame) -> list[Span]:
    """Return the end-of-turn tokens at a position."""
    spans: list[Span] = []
    row: tuple[str, ...] = ()
    for token in _row_of_tokens(text, at, frame.control):
        row = (*row, token[0])
        if row not in frame.ends:
            break
        spans.append(token.span())
    return spans


def _ends(renderer: Renderer, tools: Sequence[object], prompt: str) -> set[tuple[str, ...]]:
    """Return the rows of control tokens that end an answer which nobody has replied to, and their beginnings.

    Some templates (gpt-oss) end such an answer in one way for training, and in another before the prompt of a
    further one, as in the middle of a conversation; some (Phi 3.5) add a token that ends the text. What only
    ever begins the next turn is not among them.
    """
    probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": MARK}]
    found: set[tuple[str, ...]] = set()
    for is_asked in (False, True):
        text = _attempt(renderer, probe, tools=tools, is_asked=is_asked)
        tail = text.partition(MARK)[2]
        if is_asked and not (prompt and tail.endswith(prompt)):
            continue
        row: tuple[str, ...] = ()
        for token in _row_of_tokens(tail.removesuffix(prompt), 0, renderer.control):
            row = (*row, token[0])
            found.add(row)
    return found


def _attempt(
    renderer: Renderer, messages: Messages, *, tools: Sequence[object] = (), is_asked: bool = False
) -> str:
    """Return the text of messages; "" if the template cannot write them."""
    try:
        return renderer.render(messages, tools=tools, add_generation_prompt=is_asked)
    except PenstockError:
        return ""


def _generation_prompt(renderer: Renderer) -> str:
    """Return what the template writes for the model to continue, after a user's message; "" if unknown."""
    probe = [{"role": "user", "content": "a"}]
    alone, asked = (_attempt(renderer, probe, is_asked=is_asked) for is_asked in (False, True))
    if alone == asked:
        return _constant_prompt(renderer)
    return asked[len(alone) :] if alone and asked.startswith(alone) else ""


def _constant_prompt(renderer: Renderer) -> str:
    """Return the prompt that a template ends every text with (Command R 7B's); "" if it does not.

    Its first token is one that the first turn begins with too, and no turn ends with.
    """
    asked = {"role": "user", "content": "a"}
    system, user, answer = ({"role": role, "content": MARK} for role in ("system", "user", "assistant"))
    texts = (_attempt(renderer, messages).partition(MARK) for messages in ([system, asked], [user]))
    beginnings = set(renderer.control.findall(next((head for head, mark, _ in texts if mark), "")))
    head, _, tail = _attempt(renderer, [asked, answer]).partition(MARK)
    for token in islice(renderer.control.finditer(tail), 1, None):  # the first one ends the answer
        if token[0] in beginnings and tail[token.start() :] in head:
            return tail[token.start() :]
    return ""


def _header_start(text: str, before: int, content: int, prompt: str) -> int:
    """Return where the generation prompt of an answer starts, or the beginning of one that it has.

    Earlier turns may lack the end of a prompt, such as a `<think>` that the model continues.

    >>> _header_start("Hi<end><assistant>Hello.", 0, 18, "<assistant><think>")
    7
    """
    if prompt and (at := text.rfind(prompt, before, content)) >= 0:
        return at
    lengths = range(len(prompt), 0, -1)
    return content - next((n for n in lengths if text.endswith(prompt[:n], before, content)), 0)


def _tagged(render: Render, messages: Messages, text: str) -> list[Span]:
    """Return the spans of a text within `{% generation %}` tags.

    Raises:
        UsageError: with the tags, the template writes another text.
    """
    opening, closing = tuple(ANSWER_MARKS)
    found: list[Span] = []
    plain: list[str] = []
    at, start = 0, None
    for part in re.split(f"([{ANSWER_MARKS}])", render(messages)):
        if part == opening and start is None:
            start = at
        elif part == closing and start is not None:
            found.append((start, at))
            start = None
        elif part in (opening, closing):
            raise UsageError("The template's {% generation %} tags are nested")
        else:
            plain.append(part)
            at += len(part)
    if "".join(plain) != text or start is not None:
        raise UsageError("The template changes the text between its {% generation %} tags")
    return found


def _within_tags(
    tagged: Sequence[Span], turn: Span, content: Span, text: str, index: int
) -> tuple[Span, ...]:
    """Return the parts of a turn that are within the tags, with its end-of-turn token.

    Raises:
        UsageError: the tags leave out some of its content.
    """
    learned, at = [], turn[0]
    for first, past in tagged:
        first, past = max(first, at), min(past, turn[1])
        if first < past:
            if text[max(at, content[0]) : min(first, content[1])].strip():
                break
            learned.append((first, past))
            at = past
    if not learned or text[max(at, content[0]) : content[1]].strip():
        raise UsageError(
            f"The template's {{% generation %}} tags leave out text of the assistant's turn, message "
            f"{index + 1}",
            fix="Correct the tags, or remove all of them: answers are then found by comparing.",
        )
    if learned[-1][1] < turn[1]:
        learned.append((learned[-1][1], turn[1]))
    return tuple(learned)


def _check_rest_of_tags(
    tagged: Sequence[Span], turns: Sequence[Span], text: str, control: re.Pattern[str]
) -> None:
    """Refuse tags that hold text of no answer.

    Args:
        turns: the answers with their headers, ascending.

    Raises:
        UsageError: with that text.
    """
    for first, past in tagged:
        at = first
        for start, end in [*turns, (past, past)]:
            rest = control.sub("", text[at : min(start, past)]).strip()
            if rest:
                raise UsageError(
                    "The template's {% generation %} tags hold text that is no turn of the assistant",
                    got=rest[:60],
                    fix="Correct the tags, or remove all of them: answers are then found by comparing.",
                )
            at = max(at, end)


def _check_tools(tools: Sequence[object], text: str) -> None:
    """Refuse a text that names a tool nowhere.

    Raises:
        UsageError: with the tool.
    """
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        name = str(function.get("name", "")) if isinstance(function, Mapping) else ""
        if name and name not in text:
            raise UsageError(
                "The template drops the tools",
                got=name,
                fix="Use the template of a model that calls tools.",
            )


def _check_kept(messages: Messages, render: Render) -> None:
    """Refuse a template that drops a message of the system, the user or a tool.

    A short text may stand somewhere else as well: each is looked for with a mark of its own behind it.

    Raises:
        UsageError: with the message.
    """
    marked = {
        index: f"{content}{MARK}{index}{MARK}"
        for index, message in enumerate(messages)
        if message["role"] != "assistant" and (content := str(message.get("content") or "").strip())
    }
    text = render(
        [{**message, "content": marked.get(n, message["content"])} for n, message in enumerate(messages)]
    )
    for index, content in marked.items():
        if not _holds(text, content):
            role = messages[index]["role"]
            raise UsageError(
                f"The template drops the {role}'s turn, message {index + 1}, or changes its text",
                got=content.partition(MARK)[0][:60],
                fix="Use a template that has such turns, or leave it out of the conversation.",
            )


def _dropped(message: Mapping[str, object], answer: str, index: int) -> bool:
    """Return True if the template left out reasoning, a text of a key of its own, or one beside tool calls.

    Raises:
        UsageError: it left out something else, or everything.
    """
    content = str(message.get("content") or "").strip()
    calls = message.get("tool_calls")
    functions = [call.get("function", call) for call in calls] if isinstance(calls, list) else []
    _check_calls(functions, answer, index)
    others = {name: value for name, value in message.items() if name not in _NO_OTHER_TEXT}
    written = [_holds(answer, text.strip()) for text in _values(others) if isinstance(text, str)]
    if written and not (any(written) or content or functions or message.get("reasoning_content")):
        raise UsageError(
            f"The template writes nothing of the assistant's turn, message {index + 1}",
            got=", ".join(others),
            fix='Put what the assistant says into "content", or leave the conversation out.',
        )
    dropped = not all(written)
    if not _holds(answer, content):
        rest = content.rpartition("</think>")[2].strip()
        if not functions and (rest == content or not _holds(answer, rest)):
            raise UsageError(
                f"The template drops or changes the text of the assistant's turn, message {index + 1}",
                got=content[:60],
                fix="Correct the template, or leave the conversation out.",
            )
        dropped = True
    return dropped


def _check_calls(functions: Sequence[Mapping[str, object]], answer: str, index: int) -> None:
    """Refuse an answer that lacks the name or an argument of a call.

    Raises:
        UsageError: with what it lacks.
    """
    words = set(_NUMBER_OR_WORD.findall(answer)) if functions else set()
    for function in functions:
        name = str(function.get("name", ""))
        if name not in answer:
            raise UsageError(
                f"The template drops the tool call of message {index + 1}",
                got=name,
                fix="Use the template of a model that calls tools.",
            )
        for value in _values(function.get("arguments")):
            is_there = _has_text(answer, value) if isinstance(value, str) else _is_among(words, value)
            if not is_there:
                raise UsageError(
                    f"The template drops or changes an argument of the tool call of message {index + 1}",
                    got=str(value)[:60],
                    fix="Use the template of a model that calls tools.",
                )


def _holds(text: str, part: str) -> bool:
    """Return True if a text has a part as it is, or as JSON writes it."""
    forms = part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]
    return any(form in text for form in forms)


def _has_text(text: str, value: str) -> bool:
    """Return True if a text has the words of a value in their order, in whatever way it is quoted or escaped.

    A value without words is looked for as it is.

    >>> _has_text('one, "two"', "one\\ttwo"), _has_text("two one", "one two"), _has_text("1 + 2", "+")
    (True, False, True)
    """
    words = re.findall(r"\w+", value)
    if not words:
        return _holds(text, value.strip())
    return _in_order(text, words) or _in_order(text, [json.dumps(word)[1:-1] for word in words])


def _in_order(text: str, words: Sequence[str]) -> bool:
    at = 0
    for word in words:
        at = text.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def _is_among(words: Collection[str], value: float) -> bool:
    """Return True if a number or a boolean is among the words of a text, as JSON or Python writes it."""
    return json.dumps(value) in words or str(value) in words


def _values(value: object) -> Iterator[str | float]:
    """Yield the texts, numbers and booleans of a JSON value, the names of objects left out."""
    if isinstance(value, str | int | float):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _values(each)
    elif isinstance(value, list):
        for each in value:
            yield from _values(each)
