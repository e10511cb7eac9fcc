"""Laws of tool calls in streamed answers: pieces joined are the answer, wherever it is cut."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.chat.tool_parsers import FORMS, MARKS, Call
from penstock.serve.chat.tools import ToolReader

KINDS = {"text": "string", "count": "integer", "list": "array", "flag": "boolean", "map": "object"}
TOOLS = {
    name: {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}}
    for name in ("look_up", "f", "a.b-c")
}
WORDS = st.text(max_size=12).filter(lambda text: not any(mark in text for mark in ("<", "[", "{", "`")))
TEXT = WORDS | st.sampled_from(
    ["\n", "\n\n", " \n", '"', "\\", "</p", "<x>", "{[", "x < y\n", "\u00e9\U0001f600"]
)
JSON = st.recursive(st.none() | st.booleans() | st.integers() | TEXT, lambda each: st.lists(each, max_size=3))
VALUES = {
    "text": TEXT,
    "count": st.integers(),
    "list": st.lists(JSON, max_size=3),
    "flag": st.booleans(),
    "map": st.dictionaries(TEXT, JSON, max_size=2),
    "other": st.integers() | st.lists(JSON, max_size=2),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=VALUES)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3)
DEEPSEEK = next(form for form in FORMS if "tool\u2581calls" in form.begin)
CALL, CALL_END, SEP = DEEPSEEK.inner


def text_of(value):
    return json.dumps(value, ensure_ascii=False)


def coder(name, arguments):
    parameters = "".join(
        f"<parameter={key}>\n{value if key == 'text' else text_of(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<function={name}>\n{parameters}</function>"


WRITERS = {
    "coder": lambda calls: "\n".join(f"<tool_call>\n{coder(*call)}\n</tool_call>" for call in calls),
    "coder, in one": lambda calls: f"<tool_call>{''.join(coder(*call) for call in calls)}</tool_call>",
    "coder, unmarked": lambda calls: "\n".join(coder(*call) for call in calls),
    "hermes": lambda calls: "\n".join(
        f'<tool_call>{{"name": "{name}", "arguments": {text_of(arguments)}}}</tool_call>'
        for name, arguments in calls
    ),
    "mistral": lambda calls: "".join(
        f"[TOOL_CALLS]{name}[ARGS]{text_of(arguments)}" for name, arguments in calls
    ),
    "mistral, ids": lambda calls: "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]{at:09d}[ARGS]{text_of(arguments)}"
        for at, (name, arguments) in enumerate(calls)
    ),
    "deepseek": lambda calls: (
        DEEPSEEK.begin
        + "\n".join(
            f"{CALL}function{SEP}{name}\n```json\n{text_of(arguments)}\n```{CALL_END}"
            for name, arguments in calls
        )
        + DEEPSEEK.end
    ),
    "deepseek 3.1": lambda calls: (
        DEEPSEEK.begin
        + "".join(f"{CALL}{name}{SEP}{text_of(arguments)}{CALL_END}" for name, arguments in calls)
        + DEEPSEEK.end
    ),
}
SOUP = st.lists(
    st.sampled_from(
        [
            *sorted(MARKS - {""}),
            *("<parameter=text>", "<parameter=list>", "</parameter>", "<function=f>", "f", "f>", "\n", "{}"),
            *('{"name": "f", "arguments": ', '{"a": "', '"}', "{", "}", "[", "]", ",", "```json\n", "```"),
            *("x", "<", "</", "\\"),
        ]
    ),
    max_size=16,
).map("".join)


def read(text, cuts=(), *, streams=True, is_cut=False):
    """Return the content and the calls of an answer, each joined of its pieces."""
    reader, content, calls = ToolReader(TOOLS, streams=streams), "", []
    said = [reader.push(text[a:b]) for a, b in pairwise([0, *sorted(cuts), len(text)])]
    for one in [*said, reader.close(is_cut=is_cut)]:
        content += one.content
        for delta in one.calls:
            if delta.name is not None:
                calls.append(Call(delta.name, delta.arguments))
            else:
                calls[-1] = Call(calls[-1].name, calls[-1].arguments + delta.arguments)
    return content, calls


def cuts_of(text):
    return st.just(range(len(text))) | st.lists(st.integers(0, len(text)), max_size=12)


@given(content=WORDS, calls=CALLS, form=st.sampled_from(sorted(WRITERS)), data=st.data())
def test_the_pieces_of_an_answer_are_the_answer(content, calls, form, data):
    text = content + WRITERS[form](calls)
    whole = read(text, streams=False)
    assert (whole[0], [(call.name, json.loads(call.arguments)) for call in whole[1]]) == (content, calls)
    assert read(text, data.draw(cuts_of(text))) == whole


@given(text=SOUP, data=st.data())
def test_what_streams_does_not_depend_on_the_cuts_whatever_the_text(text, data):
    assert read(text, data.draw(cuts_of(text))) == read(text)


@given(text=SOUP, data=st.data())
def test_whole_calls_do_not_depend_on_the_cuts_whatever_the_text(text, data):
    assert read(text, data.draw(cuts_of(text)), streams=False) == read(text, streams=False)


@given(content=WORDS, calls=CALLS, form=st.sampled_from(sorted(WRITERS)), data=st.data())
def test_an_answer_that_was_cut_is_the_same_streamed_and_whole(content, calls, form, data):
    text = content + WRITERS[form](calls)
    text = text[: data.draw(st.integers(0, len(text)))]
    whole = read(text, streams=False, is_cut=True)
    assert read(text, data.draw(cuts_of(text)), is_cut=True) == whole
    complete = whole[1][:-1]
    assert [(call.name, json.loads(call.arguments)) for call in complete] == calls[: len(complete)]
