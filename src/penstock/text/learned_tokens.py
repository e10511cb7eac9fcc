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

Nothing is learned because a guess failed: what a template leaves out of a conversation is looked for
(template_drops.py), and `{% generation %}` tags are compared with what was found (generation_tags.py).
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from penstock.core.errors import PenstockError, UsageError
from penstock.text.chat_template import ANSWER_MARKS, MARK, REASONING_KEYS, Messages
from penstock.text.generation_tags import Span, check_rest_of_tags, tagged, within_tags
from penstock.text.template_drops import Render, check_kept, check_tools, has_dropped

_SPACE = re.compile(r"\s*")
_OPENED = re.compile(r"\s*<([\w-]+)>\s*\Z")
"""A prompt's last tag, which opens a thought."""


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
        raise UsageError(
            "A message has a code point that marks answers here", got=f"U+{ord(found):04X}", fix="Remove it."
        )
    render = _with(renderer.render, tools)
    text = render(messages)
    check_tools(tools, text)
    check_kept(messages, render)
    prompt = _generation_prompt(renderer)
    frame = _Frame(prompt, _ends(renderer, tools, prompt), renderer.control)
    marked = None
    if renderer.has_tags:
        marked = tagged(_with(partial(renderer.render, marked=True), tools), messages, text)
    answers: list[Answer] = []
    turns: list[Span] = []
    before = dropped = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        content, stop, ends = _located(messages, index, text, before, render, frame)
        (_, end), *more = ends
        at, start = _prompt_span(text, before, content, prompt)
        is_last = index == len(messages) - 1
        dropped += has_dropped(message, text[start:stop], index, is_last=is_last)
        learned: tuple[Span, ...] = ((start, end),)
        if marked is not None:
            learned = within_tags(marked, (start, end), (content, stop), text, index)
        answers.append(Answer(index, (*learned, *more)))
        _, before = ends[-1]
        turns.append((at, before))
    if marked is not None:
        check_rest_of_tags(marked, turns, text, renderer.control)
    return RenderedChat(text, tuple(answers), dropped)


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
    first, stop = _common(text, head), len(text) - len(tail)
    has_result = bool(is_there) and first < _result_at(messages, index, text, render) < stop
    if is_there and text.endswith(tail) and before <= first <= stop and not has_result:
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
    alone = messages[: index + 1]
    # earlier turns may have lost their reasoning, which they have where no later turn follows
    silent = [{key: turn[key] for key in turn if key not in REASONING_KEYS} for turn in alone]
    for turns in (alone, silent):
        if span := _found_alone(turns, mark, text, before, render, frame):
            start, stop, end = span
            return start, stop, [(stop, end)]
    if has_result and messages[index].get("content"):
        raise UsageError(
            f"The template writes the results of tools before the text of the turn that calls them, message "
            f"{index + 1}",
            got=str(messages[index]["content"])[:60],
            fix="Leave that text out of the turn, or use another template.",
        )
    raise UsageError(
        f"The assistant's turn, message {index + 1}, cannot be found in the text of the template",
        fix="Correct the template, or leave the conversation out.",
    )


def _result_at(messages: Messages, index: int, text: str, render: Render) -> int:
    """Return a position within the result that follows the calls of a turn; -1: no result does.

    A template may write results as a part of the turn (Gemma 4): the model does not write them.
    """
    rest = messages[index + 1 :]
    if not rest or rest[0]["role"] != "tool":
        return -1
    result = {**rest[0], "content": f"{rest[0].get('content') or ''}{MARK}"}
    other = render([*messages[: index + 1], result, *rest[1:]])
    return _common(text, other) if MARK in other else -1


def _found_alone(
    messages: Messages, mark: Mapping[str, object], text: str, before: int, render: Render, frame: _Frame
) -> tuple[int, int, int] | None:
    """Return where the content of the last turn starts and stops in a longer text, and the end of its tokens.

    Args:
        messages: the conversation up to the turn.
        mark: a turn to compare it with.
    """
    control = frame.control
    alone = render(messages).removesuffix(frame.prompt).rstrip()
    head, is_there, _ = render([*messages[:-1], mark]).partition(MARK)
    first = _before_token(alone, _common(alone, head), control)
    turn = alone[first:]
    tokens = list(control.finditer(turn))
    headers = _headers(messages, alone, first, render, frame)
    written = f"(?:{'|'.join(map(re.escape, headers))}){re.escape(turn)}"
    found = re.compile(written).search(text, before)
    if not is_there or not found or not tokens or tokens[-1].end() != len(turn):
        return None
    start = found.end() - len(turn)
    return start, start + tokens[-1].start(), found.end()


def _headers(messages: Messages, alone: str, first: int, render: Render, frame: _Frame) -> set[str]:
    """Return the texts that the last turn may follow: without one, the equal text of a user would be found.

    What the template writes between prompt and turn, such as an empty thinking block, may be missing from an
    earlier turn. A turn that goes on after the result of a tool may have no header (Gemma 4); it follows the
    last token of the result.

    Args:
        messages: the conversation up to the turn.
        alone: their text.
        first: where the content of the turn starts.
    """
    try:
        earlier = render(messages[:-1]).removesuffix(frame.prompt)
    except PenstockError:  # the template wants an answer after each message
        earlier = ""
    end = min(_common(alone, earlier), first)
    header = alone[_prompt_span(alone, end, first, frame.prompt)[0] : first]
    is_continued = not header and frame.prompt in earlier and messages[-2]["role"] == "tool"
    if is_continued and (tokens := list(frame.control.finditer(alone, 0, first))):
        return {alone[tokens[-1].start() : first]}
    return {header or frame.prompt, frame.prompt}


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


def _prompt_span(text: str, before: int, content: int, prompt: str) -> Span:
    """Return where the generation prompt of an answer starts and ends, or the beginning of one that it has.

    Earlier turns may lack the end of a prompt, such as a `<think>` that the model continues. An empty thought
    may be closed where the prompt breaks the line, or by a closing tag alone (GLM 4.7): the model writes it
    after its prompt, so it is learned.

    Args:
        content: where the text of the turn begins; inside the prompt if it opens a thought.

    >>> _prompt_span("Hi<end><assistant>Hello.", 0, 18, "<assistant><think>")
    (7, 18)
    >>> _prompt_span("Hi<end><assistant><think></think>Hello.", 0, 33, "<assistant><think>\\n")
    (7, 25)
    >>> _prompt_span("Hi<end><assistant></think>Hello.", 0, 26, "<assistant><think>")
    (7, 18)
    """
    for written in (prompt, prompt.rstrip()):
        at = text.rfind(written, before, content + len(written)) if written else -1
        if 0 <= at <= content:
            return at, at + _common(text[at : at + len(prompt)], prompt)
    end = content
    if opened := _OPENED.search(prompt):
        closed = re.compile(rf"\s*</{re.escape(opened[1])}>\s*\Z").search(text[before:content])
        end = before + closed.start() if closed else content
    lengths = range(len(prompt), 0, -1)
    common = next((n for n in lengths if text.endswith(prompt[:n], before, end)), 0)
    if not common:
        return content, content
    return end - common, end
