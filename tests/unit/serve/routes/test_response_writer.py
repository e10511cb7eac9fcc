"""Pieces of an answer as events of `/v1/responses`."""

from penstock.engine.request import OutputDelta
from penstock.serve.chat.tools import ToolUse, tool_use
from penstock.serve.chat.writer import ChatWriter
from penstock.serve.errors import ApiError
from penstock.serve.routes.responses import ResponseWriter
from penstock.serve.schema.base import PromptTokensDetails, Usage
from penstock.serve.schema.chat import NamedFunction, NamedTool, Tool
from penstock.serve.schema.responses import ResponseReply, ResponseText

USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=2,
    total_tokens=5,
    prompt_tokens_details=PromptTokensDetails(cached_tokens=1),
)
ADD = [Tool.model_validate({"type": "function", "function": {"name": "add"}})]
MAY_ADD = tool_use(ADD, "auto")
MUST_ADD = tool_use(ADD, NamedTool(type="function", function=NamedFunction(name="add")))
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def writer(use=MAY_ADD, *, streams=True):
    frame = ResponseReply(
        id="r",
        created_at=1,
        model="m",
        status="in_progress",
        instructions=None,
        max_output_tokens=None,
        metadata={},
        temperature=1,
        text=ResponseText(format={"type": "text"}),
        top_p=1,
    )
    return ResponseWriter(frame, ChatWriter(0, names=None, use=use, streams=streams))


def events_of(*texts, use=MAY_ADD, finish="stop", streams=True):
    made = writer(use, streams=streams)
    pieces = [
        *(OutputDelta(request_id=0, text=text) for text in texts[:-1]),
        OutputDelta(request_id=0, text=texts[-1], finish=finish),
    ]
    events = [*made.begin(), *(event for piece in pieces for event in made.take(piece)), *made.end(USAGE)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def kinds(events):
    return [event.type.removeprefix("response.") for event in events]


def test_an_answer_that_ends_by_itself_is_completed():
    events = events_of("a", "", "b", use=ToolUse())
    assert [event.delta for event in events if event.delta] == ["a", "b"]
    reply = events[-1].response
    assert (events[-1].type, reply.status, reply.incomplete_details) == (
        "response.completed",
        "completed",
        None,
    )
    assert reply.output[0].content[0].text == "ab"
    assert (reply.usage.input_tokens_details.cached_tokens, reply.usage.total_tokens) == (1, 5)


def test_words_calls_and_words_are_items_in_their_order():
    events = events_of("Sure. ", CALL, CALL, " Done.")
    opened = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert opened == ["message", "function_call", "function_call", "message"]
    indices = [event.output_index for event in events if event.output_index is not None]
    assert (indices, set(indices)) == (sorted(indices), {0, 1, 2, 3})
    first, one, two, last = events[-1].response.output
    assert (first.content[0].text, last.content[0].text) == ("Sure. ", " Done.")
    assert [call.arguments for call in (one, two)] == ['{"a": 1}'] * 2
    assert len({first.id, one.id, two.id, last.id, one.call_id, two.call_id}) == 6


def test_a_call_alone_has_no_message_beside_it():
    events = events_of(CALL)
    assert kinds(events)[2:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    [call] = events[-1].response.output
    assert (call.name, call.status, events[4].arguments) == ("add", "completed", call.arguments)
    assert (events[2].item.arguments, events[2].item.status) == ("", "in_progress")


def test_an_empty_answer_is_an_empty_message():
    [item] = events_of("")[-1].response.output
    assert (item.type, item.content[0].text) == ("message", "")


def test_a_named_function_streams_its_arguments_and_says_if_they_were_cut():
    events = events_of('{"a"', ": 1", use=MUST_ADD, finish="length")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == ['{"a"', ": 1"]
    reply = events[-1].response
    [call] = reply.output
    assert (call.arguments, call.status, reply.status) == ('{"a": 1', "incomplete", "incomplete")


def test_a_call_that_was_cut_is_the_same_where_nothing_was_sent_of_it():
    reply = events_of('{"a"', ": 1", use=MUST_ADD, finish="length", streams=False)[-1].response
    [call] = reply.output
    assert (call.arguments, call.status, reply.status) == ('{"a": 1', "incomplete", "incomplete")


def test_an_answer_that_fails_says_why_in_its_last_event():
    made = writer()
    num_events = len(list(made.begin()))
    event = made.failed(ApiError("It took too long.", status=504))
    assert (event.type, event.sequence_number) == ("response.failed", num_events)
    assert (event.response.status, event.response.error.message) == ("failed", "It took too long.")
