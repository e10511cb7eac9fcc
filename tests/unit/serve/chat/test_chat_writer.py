"""Pieces of an answer as deltas of a message."""

import pytest

from penstock.engine.request import OutputDelta
from penstock.serve.chat.reasoning import ReasoningReader
from penstock.serve.chat.tools import ToolUse, tool_use
from penstock.serve.chat.writer import ChatWriter, joined
from penstock.serve.schema.chat import NamedTool, Tool

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
ADD = [Tool.model_validate({"type": "function", "function": {"name": "add"}})]
MAY_ADD = tool_use(ADD, "auto")
MUST_ADD = tool_use(
    ADD, NamedTool.model_validate(ADD[0].model_dump(include={"type", "function"}, exclude_none=True))
)


def written(*texts, use=MAY_ADD, finish="stop", reason=None, streams=True, stop_ids=()):
    writer = ChatWriter(0, names=None, use=use, streams=streams, stop_ids=stop_ids)
    pieces = [OutputDelta(request_id=0, text=text) for text in texts[:-1]]
    last = OutputDelta(request_id=0, text=texts[-1], finish=finish, stop_reason=reason)
    return [writer.take(piece) for piece in (*pieces, last)]


def test_text_is_text_where_there_are_no_tools():
    message = joined(0, written("a ", CALL, use=ToolUse())).message
    assert (message.content, message.tool_calls) == (f"a {CALL}", None)


def test_thoughts_stand_apart_and_calls_in_them_are_none():
    writer = ChatWriter(0, names=None, use=MAY_ADD, reasoning=ReasoningReader(is_open=False), streams=False)
    texts = (f"<think>{CALL}</th", "ink>\n\n", f"Sure. {CALL}")
    pieces = [
        OutputDelta(request_id=0, text=text, finish="stop" if text == texts[-1] else None) for text in texts
    ]
    chunks = [writer.take(piece) for piece in pieces]
    assert "".join(chunk.delta.reasoning_content or "" for chunk in chunks) == CALL
    message = joined(0, chunks).message
    assert (message.reasoning_content, message.content, len(message.tool_calls)) == (CALL, "Sure. ", 1)


def test_a_call_is_a_tool_call_with_arguments_in_a_text():
    choice = joined(0, written("Sure. ", CALL))
    assert (choice.message.content, choice.finish_reason) == ("Sure. ", "tool_calls")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "add", '{"a": 1}')
    assert call.id.startswith("call_")


def test_a_call_alone_leaves_no_content():
    assert joined(0, written(CALL)).message.content is None
    assert joined(0, written(" \n", CALL)).message.content is None


def test_a_named_function_streams_its_arguments():
    chunks = written('{"a"', ": 1", "}", use=MUST_ADD)
    deltas = [chunk.delta.tool_calls[0] for chunk in chunks]
    assert [delta.function.name for delta in deltas] == ["add", None, None]
    assert [delta.id is not None for delta in deltas] == [True, False, False]
    assert joined(0, chunks).message.tool_calls[0].function.arguments == '{"a": 1}'


def test_an_answer_that_was_cut_says_so_even_with_a_call():
    assert joined(0, written(CALL, finish="length")).finish_reason == "length"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("finish", "reason"), [("length", None), ("stop", "z"), ("stop", 7)])
@pytest.mark.parametrize(("use", "text"), [(MAY_ADD, CALL[:45]), (MUST_ADD, '{"a": 1'), (MUST_ADD, "")])
def test_a_call_that_was_cut_is_not_finished(use, text, finish, reason, streams):
    choice = joined(
        0, written(text[:5], text[5:], use=use, finish=finish, reason=reason, streams=streams, stop_ids=[7])
    )
    [call] = choice.message.tool_calls
    assert (choice.message.content, call.function.name) == (None, "add")
    assert call.function.arguments == (text if use is MUST_ADD else text.partition('"arguments": ')[2])
    assert choice.finish_reason == finish


@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_which_one_is_broken_are_not_finished(streams):
    text = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a'
    choice = joined(0, written(text, reason="z", streams=streams))
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a": 1}', '{"a']
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_text_that_ends_a_call_does_not_cut_it(streams):
    text = "<function=add>\n<parameter=a>\n1\n</parameter>\n"
    choice = joined(0, written(text, reason="</function>", streams=streams))
    assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mark", ["</tool_call>", "<tool_call>"])
def test_a_stop_text_that_is_a_mark_within_a_text_cuts_the_call(mark, streams):
    text = '<tool_call>{"name": "add", "arguments": {"a": "'
    choice = joined(0, written(text, reason=mark, streams=streams))
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a": "']
    assert choice.finish_reason == "stop"


SUB = Tool.model_validate({"type": "function", "function": {"name": "sub"}})
REQUIRED = {
    "plain": '{"name": "add", "arguments": {"a": 1}}',
    "list": '[{"name": "add", "arguments": {"a": 1}}, {"name": "sub", "arguments": {}}]',
    "marked": CALL.replace("{", "\n{", 1) + '\n<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>',
}


@pytest.mark.parametrize("form", REQUIRED)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tools", [ADD, [*ADD, SUB]], ids=["one tool", "two tools"])
def test_a_required_call_is_a_call_wherever_it_is_cut(form, streams, tools):
    text, use = REQUIRED[form], tool_use(tools, "required")
    if len(tools) == 1 and form != "plain":
        text = text[: text.index("}}") + 2]
    for at in range(len(text)):
        chunks = written(text[: at // 2], text[at // 2 : at], use=use, finish="length", streams=streams)
        choice = joined(0, chunks)
        calls = choice.message.tool_calls or []
        assert not choice.message.content, text[:at]
        assert choice.finish_reason == "length"
        assert "add".startswith("".join(call.function.name for call in calls[:1]))
        assert bool(calls) or (len(tools) > 1 and '"name": "a' not in text[:at]), text[:at]
        if calls:
            assert '{"a": 1}'.startswith(calls[0].function.arguments)


def test_the_first_delta_of_a_call_has_no_content():
    for use, content in ((ToolUse(), ""), (MAY_ADD, None), (MUST_ADD, None)):
        assert ChatWriter(0, names=None, use=use, streams=True).begin().delta.content == content
