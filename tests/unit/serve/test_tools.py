"""Calls of tools in text, however it is cut into pieces."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.tools import Call, ToolReader, read_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>"}}\n</tool_call>'


def read(text, cuts=()):
    reader, content, calls, before = ToolReader({"add", "sub"}), "", [], 0
    for cut in [*sorted(cuts), len(text)]:
        said = reader.push(text[before:cut])
        content, calls, before = content + said.content, [*calls, *said.calls], cut
    said = reader.close()
    return content + said.content, [*calls, *said.calls]


TEXTS = {
    "words": ("No call here, but a < and <tool.", "No call here, but a < and <tool.", 0),
    "hermes": (f"I add.\n{CALL}", "I add.\n", 1),
    "two": (f"{CALL}\n{CALL.replace('add', 'sub')}", "", 2),
    "words after": (f"{CALL} Done.", " Done.", 1),
    "llama": (' {"name": "add", "parameters": {"a": 1}}', "", 1),
    "mistral": ('[{"name": "add", "arguments": {}}, {"name": "sub", "arguments": {}}]', "", 2),
    "json that is no call": ('{"sum": 3}', '{"sum": 3}', 0),
    "unknown tool": (CALL.replace("add", "mul"), CALL.replace("add", "mul"), 0),
    "broken JSON": ("<tool_call>{oops</tool_call>!", "<tool_call>{oops</tool_call>!", 0),
    "cut short": ('a <tool_call>{"name": "add"', 'a <tool_call>{"name": "add"', 0),
    "no end mark": (CALL.removesuffix("</tool_call>"), "", 1),
    "arguments in a text": ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", 1),
}


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_every_form_is_read_wherever_the_text_is_cut(name, data):
    text, expected, num_calls = TEXTS[name]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    content, calls = read(text, cuts)
    assert (content, len(calls)) == (expected, num_calls)
    assert all(isinstance(json.loads(call.arguments), dict) for call in calls)


def test_arguments_are_those_that_were_written():
    assert read(CALL)[1] == [Call("add", '{"a": 1, "b": "</x>"}')]


def test_words_stream_as_they_come():
    reader = ToolReader({"add"})
    assert reader.push("Hello ").content == "Hello "
    assert reader.push("world <").content == "world "


def test_deep_json_is_text_and_no_error():
    assert read_calls("[" * 100_000, {"add"}) == ()
