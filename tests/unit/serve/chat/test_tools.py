"""Calls of tools in text, however it is cut into pieces."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.serve.chat.json_scan import is_object
from penstock.serve.chat.tool_parsers import Call, read_json
from penstock.serve.chat.tools import ToolReader

ADD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string"},
        "c": {"type": "boolean"},
        "d": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "e": {"type": ["array", "null"]},
    },
}
TOOLS = {"add": ADD, "sub": {}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "</x>"}}\n</tool_call>'
XML = "<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n<x>\n</parameter>\n</function>"
CODER = f"<tool_call>\n{XML}\n</tool_call>"
DEEPSEEK = """<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>add
```json
{"a": 1}
```<|tool_call_end|>
<|tool_call_begin|>function<|tool_sep|>sub
```json
{}
```<|tool_call_end|><|tool_calls_end|>""".replace("|", "\uff5c").replace("_", "\u2581")
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
DEEPSEEK_31 = """<|tool_calls_begin|><|tool_call_begin|>add<|tool_sep|>{"a": 1}<|tool_call_end|>\
<|tool_calls_end|>""".replace("|", "\uff5c").replace("_", "\u2581")
MISTRAL = '[TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{"a": 1, "b": "[TOOL_CALLS]"}'


def read(text, cuts=(), *, streams=False, is_cut=False):
    """Return words and calls, each joined of its pieces."""
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


TEXTS = {
    "words": ("No call here, but a < and <tool.", "No call here, but a < and <tool.", 0),
    "hermes": (f"I add.\n{CALL}", "I add.\n", 1),
    "two": (f"{CALL}\n{CALL.replace('add', 'sub')}", "", 2),
    "words after": (f"{CALL} Done.", " Done.", 1),
    "mistral, marked": ('Sure. [TOOL_CALLS][{"name": "add", "arguments": {}}]', "Sure. ", 1),
    "mistral, marked at once": ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x"}]', "", 1),
    "granite 3": ('<|tool_call|>[{"name": "sub", "arguments": {}}, {"name": "add", "arguments": {}}]', "", 2),
    "words in brackets": ("[TOOLS] are", "[TOOLS] are", 0),
    "spaces": ('{ "name" : "add" ,\n "arguments" : {"a" : 1} }', "", 1),
    "llama": (' {"name": "add", "parameters": {"a": 1}}', "", 1),
    "mistral": ('[{"name": "add", "arguments": {}}, {"name": "sub", "arguments": {}}]', "", 2),
    "json that is no call": ('{"sum": 3}', '{"sum": 3}', 0),
    "unknown tool": (CALL.replace("add", "mul"), CALL.replace("add", "mul"), 0),
    "broken JSON": ("<tool_call>{oops</tool_call>!", "<tool_call>{oops</tool_call>!", 0),
    "cut short": ('a <tool_call>{"name": "add"', 'a <tool_call>{"name": "add"', 0),
    "no end mark": (CALL.removesuffix("</tool_call>"), "", 1),
    "coder": (f"I add.\n{CODER}", "I add.\n", 1),
    "coder, two": (f"{CODER}\n{CODER}", "", 2),
    "coder, two between marks": (f"<tool_call>{XML}\n{XML}</tool_call>", "", 2),
    "coder, no outer marks": (f"I add. {XML}", "I add. ", 1),
    "coder, cut after a parameter": (XML.removesuffix("</function>"), "", 1),
    "coder, cut in a parameter": (XML[:50], XML[:50], 0),
    "coder, words between": (CODER.replace("</function>", "oops</function>"),) * 2 + (0,),
    "coder, unknown tool": (CODER.replace("add", "mul"), CODER.replace("add", "mul"), 0),
    "coder, half of it": ("<tool_call>" + XML + "oops</tool_call>",) * 2 + (0,),
    "llama 3.1": ('<function=add>{"a": 1}</function>', "", 1),
    "llama 3.1, no JSON": ("<function=add>{a}</function>",) * 2 + (0,),
    "deepseek": (f"I add. {DEEPSEEK}", "I add. ", 2),
    "deepseek 3.1": (DEEPSEEK_31, "", 1),
    "deepseek, unknown tool": (DEEPSEEK.replace("sub", "mul"),) * 2 + (0,),
    "deepseek, broken JSON": (DEEPSEEK.replace("{}", "{"),) * 2 + (0,),
    "mistral, names": (f"I add.{MISTRAL}[TOOL_CALLS]sub[ARGS]{{}}", "I add.", 2),
    "mistral, names in lines": (f"{MISTRAL}\n[TOOL_CALLS] add[ARGS] {{}}\n", "", 2),
    "mistral, names alone": ('[TOOL_CALLS]sub{"x": [1]}', "", 1),
    "mistral, unknown name": ("[TOOL_CALLS]mul[ARGS]{}",) * 2 + (0,),
    "mistral, no arguments": ("[TOOL_CALLS]add",) * 2 + (0,),
    "mistral, broken JSON": ("[TOOL_CALLS]add[ARGS]{",) * 2 + (0,),
    "mistral, words after": (f"{MISTRAL} Done.",) * 2 + (0,),
    "coder, no parameters": ("<tool_call><function=sub>\n</function></tool_call>", "", 1),
    "coder, many spaces": (CODER.replace("</parameter>", "</parameter>" + " " * 600), "", 1),
    "coder, a parameter twice": (XML.replace("=b", "=a"),) * 2 + (0,),
    "arguments that are no object": (CALL.replace('{"a": 1, "b": "</x>"}', "[1]"),) * 2 + (0,),
    "not a number": (CALL.replace("1", "NaN"),) * 2 + (0,),
    "arguments in a text that are no JSON": ('{"name": "add", "arguments": "a = 1"}',) * 2 + (0,),
    "number beyond float64": (CALL.replace("1", "1e999"), "", 1),
    "number of 5,000 digits": (CALL.replace("1", "9" * 5000), "", 1),
    "3,000 levels": (CALL.replace("1", "[" * 3000 + "]" * 3000), "", 1),
    "end mark in a string": (CALL.replace("</x>", "</tool_call>"), "", 1),
    "end mark after half a string": ('<tool_call>{"name": "add\n</tool_call>!',) * 2 + (0,),
    "end mark in a string, llama 3.1": ('<function=add>{"b": "</function>"}</function>', "", 1),
    "end mark in a string, deepseek": (DEEPSEEK_31.replace("1}", f'"{CALLS_END}"}}'), "", 1),
    "arguments in a text": ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", 1),
}

ADDED, BOTH = Call("add", '{"a": 1}'), Call("add", '{"a": 1, "b": "2\\n<x>"}')
STREAMED = {
    "not a number": ("}\n</tool_call>", [Call("add", '{"a": NaN, "b": "</x>"}')]),
    "coder, cut in a parameter": ("", [Call("add", '{"a": 1')]),
    "coder, words between": ("", [Call("add", BOTH.arguments.removesuffix("}"))]),
    "coder, half of it": ("oops</tool_call>", [BOTH]),
    "coder, a parameter twice": ("", [Call("add", '{"a": 1')]),
    "llama 3.1, no JSON": ("</function>", [Call("add", "{a}")]),
    "deepseek, unknown tool": (DEEPSEEK.partition('{"a": 1}')[2].replace("sub", "mul"), [ADDED]),
    "deepseek, broken JSON": (
        "",
        [ADDED, Call("sub", DEEPSEEK.replace("{}", "{")[DEEPSEEK.index("{}") :].removesuffix(CALLS_END))],
    ),
    "mistral, broken JSON": ("", [Call("add", "{")]),
    "mistral, words after": (" Done.", [Call("add", '{"a": 1, "b": "[TOOL_CALLS]"}')]),
}
"""What a stream has sent of texts that turn out to be malformed: it cannot be taken back."""


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_every_form_is_read_wherever_the_text_is_cut(name, data):
    text, expected, num_calls = TEXTS[name]
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    for streams in (False, True):
        content, calls = read(text, cuts, streams=streams)
        if streams and name in STREAMED:
            assert (content, calls) == STREAMED[name]
            continue
        assert (content, len(calls)) == (expected, num_calls), streams
        assert all(is_object(call.arguments) for call in calls), streams
        if streams:
            assert calls == read(text)[1]


@given(cut=st.integers(len('<tool_call>\n{"name": "add", "arguments": '), CALL.rindex("}")))
def test_arguments_stream_as_they_are_written(cut):
    reader = ToolReader(TOOLS, streams=True)
    said = [reader.push(letter) for letter in CALL[:cut]]
    told = "".join(delta.arguments for one in said for delta in one.calls)
    written = CALL[len('<tool_call>\n{"name": "add", "arguments": ') : cut]
    assert told == written or written.endswith(("<", "</"))  # which may begin the end mark


def test_a_parameter_that_is_a_string_streams_as_it_is_written_and_another_once_it_is_whole():
    reader = ToolReader(TOOLS, streams=True)
    for piece, new in (
        ("<function=add>", ""),
        ("<parameter=a>\n", '{"a": '),
        ("1", ""),
        ("2\n", ""),
        ("</parameter>", "12"),
        ("\n<parameter=b>", ""),
        ("\nOne", ', "b": "One'),
        (' "two"\n', ' \\"two\\"'),
        ("\n\t", "\\n\\n\\t"),
        ("</p", ""),
        (">", "</p>"),
        ("\n</parameter>", '"'),
        ("</function>", "}"),
    ):
        assert "".join(delta.arguments for delta in reader.push(piece).calls) == new


@pytest.mark.parametrize("streams", [False, True])
def test_of_calls_that_were_cut_the_last_has_the_arguments_written_so_far(streams):
    begun = '[{"name": "sub", "arguments": {}}, {"name": "add", "arguments": {"a": '
    calls = [Call("sub", "{}"), Call("add", '{"a": ')]
    assert read(begun, range(len(begun)), streams=streams, is_cut=True) == ("", calls)
    assert read(f"[TOOL_CALLS]{begun}", streams=streams, is_cut=True) == ("", calls)
    text = DEEPSEEK.partition("{}")[0]
    assert read(text, streams=streams, is_cut=True) == (text.partition('{"a": 1}')[2], [ADDED])


@pytest.mark.parametrize("other", ['{"a": oops}', '{"a": oops}}, {"name": "add", "arguments": {"a'])
def test_of_calls_that_were_cut_no_text_is_lost_beside_a_malformed_one(other):
    text = f'[{{"name": "sub", "arguments": {{}}}}, {{"name": "add", "arguments": {other}'
    assert read(text, is_cut=True) == (text.partition("{}")[2], [Call("sub", "{}")])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (CALL[:-20], None),
        (CALL.removesuffix("</tool_call>"), None),
        (CALL, None),
        (f"<tool_call>{XML}</tool_call>", None),
        (XML.removesuffix("</function>"), None),
        (XML, None),
        (DEEPSEEK[: DEEPSEEK.index("1}")], '{"a": '),
        ('{"name": "add", "arguments": {"a": 1', '{"a": 1'),
        ('{"name": "add", "arguments": {"a": 1}', '{"a": 1}'),
        (XML.partition("<parameter=b>")[0], '{"a": 1'),
    ],
)
def test_a_call_that_was_cut_has_the_arguments_written_so_far(text, arguments, streams):
    content, [call] = read(text, is_cut=True, streams=streams)
    assert (content, call.name) == ("", "add")
    assert arguments is None or call.arguments == arguments


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("text", [CALL[:20], '{"name": "ad', "<function=add"])
def test_a_call_that_was_cut_before_its_arguments_is_text(text, streams):
    assert read(text, is_cut=True, streams=streams) == (text, [])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("call", [CALL, XML, f"<tool_call>{XML}</tool_call>"])
@pytest.mark.parametrize("words", [" Now I", " so x <", "["])
def test_words_after_a_call_are_said_once_and_so_is_the_call(call, words, streams):
    reader = ToolReader(TOOLS, streams=streams)
    said = [*(reader.push(letter) for letter in call + words), reader.close(is_cut=True)]
    assert "".join(one.content for one in said) == words
    assert sum(delta.name is not None for one in said for delta in one.calls) == 1


@pytest.mark.parametrize("unmarked", ["content", "calls or content"])
@pytest.mark.parametrize("streams", [False, True])
def test_a_json_text_in_place_of_a_call_is_said_whatever_marker_it_names(streams, unmarked):
    text = json.dumps(CALL)
    reader = ToolReader(TOOLS, streams=streams, unmarked=unmarked)
    said = [*(reader.push(letter) for letter in text), reader.close()]
    assert "".join(one.content for one in said) == text
    assert not [call for one in said for call in one.calls]


@pytest.mark.parametrize("other", ["<function=unknown>\n</function>", "<function=add>\noops\n</function>"])
def test_a_call_beside_a_malformed_one_does_not_take_its_arguments(other):
    good = "<function=sub>\n<parameter=x>\n55\n</parameter>\n</function>"
    text = f"<tool_call>{other}\n{good}</tool_call>"
    assert read(text) == (text, [])
    reader = ToolReader(TOOLS, streams=True)
    said = [*(reader.push(letter) for letter in text), reader.close()]
    assert "55" not in "".join(delta.arguments for one in said for delta in one.calls)


def test_arguments_are_those_that_were_written():
    assert read(CALL)[1] == [Call("add", '{"a": 1, "b": "</x>"}')]
    assert read(DEEPSEEK)[1] == [Call("add", '{"a": 1}'), Call("sub", "{}")]
    assert read(DEEPSEEK_31)[1] == [Call("add", '{"a": 1}')]
    spaced = '{ "b":"é \\u00e9" }'
    assert read(f"[TOOL_CALLS]add[ARGS]{spaced}") == ("", [Call("add", spaced)])


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("a", "1", 1),
        ("a", "one", "one"),
        ("b", "1", "1"),
        ("b", "\n x \n", "\n x \n"),
        ("c", "True", True),
        ("d", "1", "1"),
        ("d", "null", None),
        ("e", "[1, {}]", [1, {}]),
        ("unknown", '{"x": 1}', {"x": 1}),
        ("unknown", "a word", "a word"),
        ("a", "1e999", "1e999"),
        ("unknown", "[-1e999]", "[-1e999]"),
    ],
)
def test_parameters_are_of_the_type_that_their_schema_says(key, text, value):
    [call] = read(f"<function=add><parameter={key}>\n{text}\n</parameter></function>")[1]
    assert json.loads(call.arguments) == {key: value}


def test_a_schema_that_is_none_is_no_fault_of_a_call():
    tools = {"f": {"properties": {"x": {"anyOf": None, "type": {}}}}}
    said = ToolReader(tools, streams=True).push("<function=f><parameter=x>1</parameter></function>")
    assert "".join(delta.arguments for delta in said.calls) == '{"x": 1}'


def test_half_of_a_surrogate_pair_stays_json():
    [call] = read(CALL.replace("</x>", "\\ud83d"))[1]
    assert json.loads(call.arguments)["b"] == "\ud83d"
    assert call.arguments.isascii()


@pytest.mark.parametrize("text", ["<parameter=a>", "<function=add>", "</parameter>", "<tool_call>"])
def test_marks_without_end_take_no_longer_than_their_length(text):
    text = "<function=add>" + text * 100_000
    assert read(text) == (text, [])


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("marks", [("<tool_call>", "</tool_call>"), ("", "")])
def test_a_long_call_in_small_pieces_is_read_once(streams, marks):
    arguments = json.dumps({"b": "x = 1;\n" * 5_000})
    text = f'{marks[0]}{{"name": "add", "arguments": {arguments}}}{marks[1]}'
    assert read(text, range(0, len(text), 4), streams=streams) == ("", [Call("add", arguments)])


@pytest.mark.parametrize("key", ["b", "unknown"])
def test_long_parameters_in_small_pieces_are_read_once(key):
    value = "x = 1;\n" * 5_000
    text = f"<function=add><parameter={key}>\n{value}\n</parameter></function>"
    [call] = read(text, range(0, len(text), 4), streams=True)[1]
    assert json.loads(call.arguments) == {key: value}


def test_words_stream_as_they_come():
    reader = ToolReader({"add": {}})
    assert reader.push("Hello ").content == "Hello "
    assert reader.push("world <").content == "world "


def test_deep_json_is_text_and_no_error():
    assert read_json("[" * 100_000, {"add": {}}) == ()
