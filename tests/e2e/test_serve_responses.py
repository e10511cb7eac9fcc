"""`/v1/responses`, asked with the client of OpenAI and held against its types."""

import json

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.serving import ADD, strict

SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
TOOL = {"type": "function", **ADD["function"], "strict": True}
NOW = {"type": "function", "name": "now", "parameters": None, "strict": False}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
EVENT = TypeAdapter(ResponseStreamEvent)
GREEDY = {"model": "tiny", "input": "the penstock", "temperature": 0, "max_output_tokens": 12}


def chat(client, messages, **more):
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 12, "messages": messages, **more}
    reply = client.chat.completions.create(**asked)
    return reply.choices[0].message.content, reply.usage


def test_an_answer_is_of_the_published_type_and_that_of_a_chat(client):
    reply = client.responses.create(**GREEDY, instructions="Be brief.", metadata={"a": "b"}, top_p=0.9)
    strict(Response, reply)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the penstock"}]
    text, usage = chat(client, messages)
    assert reply.output_text == text
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (usage.prompt_tokens, 12)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (reply.metadata, reply.instructions, reply.top_p, reply.store) == (
        {"a": "b"},
        "Be brief.",
        0.9,
        False,
    )


def test_an_answer_can_be_sent_back_as_part_of_the_next_input(client):
    first = client.responses.create(**GREEDY)
    said = [{"role": "user", "content": [{"type": "input_text", "text": "the penstock"}]}]
    written = [item.model_dump() for item in first.output]  # with what the API's objects have and we do not
    second = client.responses.create(**{**GREEDY, "input": [*said, *written, *said]})
    user = {"role": "user", "content": "the penstock"}
    text, _ = chat(client, [user, {"role": "assistant", "content": first.output_text}, user])
    assert second.output_text == text


def test_events_are_of_the_published_types_and_join_to_the_answer(client):
    whole = client.responses.create(**GREEDY)
    events = list(client.responses.create(**GREEDY, stream=True))
    for event in events:
        assert type(EVENT.validate_json(event.model_dump_json(exclude_unset=True), strict=True)) is type(
            event
        )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(event.delta for event in events[4:-4]) == whole.output_text == events[-4].text
    last = strict(Response, events[-1].response)
    assert (last.output_text, last.usage.total_tokens) == (whole.output_text, whole.usage.total_tokens)


def test_an_answer_follows_a_schema_alone_and_gathered_by_the_clients_own_helper(client):
    form = {"type": "json_schema", "name": "state", "schema": SCHEMA, "strict": True}
    asked = {"model": "tiny", "input": "the", "text": {"format": form}, "max_output_tokens": 200}
    reply = client.responses.create(**asked)
    strict(Response, reply)
    with client.responses.stream(**asked) as stream:
        gathered = stream.get_final_response()
    for found in (reply, gathered):
        jsonschema.validate(json.loads(found.output_text), SCHEMA)
        assert (found.status, found.text.format.name) == ("completed", "state")


def test_a_function_is_called_and_its_output_answered_as_in_a_chat(client):
    choice = {"type": "function", "name": "add"}
    asked = {**GREEDY, "max_output_tokens": 200, "tools": [TOOL]}
    reply = client.responses.create(**asked, tool_choice=choice)
    strict(Response, reply)
    [call] = reply.output
    assert (call.type, call.name, call.status, reply.status) == ("function_call", "add", *["completed"] * 2)
    assert set(json.loads(call.arguments)) == {"a", "big"}
    assert (reply.tools[0].name, reply.tool_choice.name, reply.output_text) == ("add", "add", "")
    for item in (call.model_dump(), call.to_dict()):  # as a client has it
        output = {**OUTPUT, "call_id": call.call_id}
        turns = [{"role": "user", "content": "the penstock"}, item, output]
        second = client.responses.create(**{**asked, "input": turns}, tool_choice="none")
        function = {"name": call.name, "arguments": call.arguments}
        made = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        told = [turns[0], made, {"role": "tool", "tool_call_id": "c", "content": "2"}]
        text, usage = chat(client, told, max_tokens=200)
        assert (second.output_text, second.usage.input_tokens) == (text, usage.prompt_tokens)


@pytest.mark.parametrize("several", [True, False])
def test_calls_stream_as_events_that_the_clients_own_helper_joins(client, several):
    asked = {**GREEDY, "max_output_tokens": 400, "tools": [TOOL, NOW], "temperature": 1}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    choice = "required" if several else allowed
    asked |= {"tool_choice": choice, "parallel_tool_calls": several}
    events = list(client.responses.create(**asked, stream=True))
    for event in events:
        assert type(EVENT.validate_json(event.model_dump_json(exclude_unset=True), strict=True)) is type(
            event
        )
    last = strict(Response, events[-1].response)
    done = [event.arguments for event in events if event.type.endswith("arguments.done")]
    assert [item.arguments for item in last.output if item.type == "function_call"] == done
    with client.responses.stream(**asked) as stream:
        joined = [event for event in stream if event.type == "response.function_call_arguments.delta"]
        calls = stream.get_final_response().output if not several else []
    assert joined
    if not several:
        assert [(call.name, call.arguments) for call in calls] == [("add", joined[-1].snapshot)]


class State(BaseModel):
    open: bool


def test_the_client_parses_answers_and_arguments(client):
    asked = {"model": "tiny", "input": "the", "max_output_tokens": 200}
    assert isinstance(client.responses.parse(**asked, text_format=State).output_parsed, State)
    tool = openai.pydantic_function_tool(State)["function"]
    tools = [{"type": "function", **tool}]
    reply = client.responses.parse(**asked, tools=tools, tool_choice={"type": "function", "name": "State"})
    [call] = reply.output
    assert State.model_validate(call.parsed_arguments)
    sent = [{"role": "user", "content": "the"}, call.model_dump(), {**OUTPUT, "call_id": call.call_id}]
    assert client.responses.create(**{**asked, "input": sent}).status in ("completed", "incomplete")


def test_an_effort_is_a_variable_of_the_template(client):
    plain = client.responses.create(**GREEDY)
    more = client.responses.create(**GREEDY, reasoning={"effort": "low"})
    assert more.usage.input_tokens > plain.usage.input_tokens
    assert more.reasoning.effort == "low"


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 1, "seed": 5},
        {"temperature": 1, "seed": 5, "top_k": 3, "min_p": 0.01},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5},
        {"logit_bias": {"9": 100}},
        {"allowed_token_ids": [30, 31], "ignore_eos": True},
        {"chat_template_kwargs": {"loud": True}},
        {"guided_choice": ["weir", "sluice"]},
    ],
    ids=lambda more: "+".join(more),
)
def test_settings_of_a_chat_work_here_too(client, more):
    long = {**GREEDY, "max_output_tokens": 50}
    plain = client.responses.create(**long)
    asked = {"temperature": more.get("temperature", 0), "extra_body": more}
    reply = client.responses.create(**{**long, **asked})
    text, usage = chat(client, [{"role": "user", "content": "the penstock"}], max_tokens=50, **asked)
    assert (reply.output_text, reply.usage.input_tokens) == (text, usage.prompt_tokens)
    assert reply.output_text != plain.output_text or usage.prompt_tokens != plain.usage.input_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_a_stop_text_ends_an_answer_and_completes_it(client, streams):
    whole = client.responses.create(**GREEDY).output_text
    stop = whole[len(whole) // 2 :][:3]
    asked = {**GREEDY, "extra_body": {"stop": [stop, "never"]}, "stream": streams}
    reply = client.responses.create(**asked)
    if streams:
        *events, last = reply
        reply = last.response
        deltas = [event.delta for event in events if event.type.endswith("text.delta")]
        assert "".join(deltas) == reply.output_text
    assert reply.output_text == whole[: whole.index(stop)]
    assert (reply.status, reply.incomplete_details, reply.stop_reason) == ("completed", None, stop)


def test_hints_and_nulls_change_nothing(client):
    hints = {
        "text": {"verbosity": "low", "format": None},
        "reasoning": {"summary": "auto", "effort": None},
        "include": ["reasoning.encrypted_content"],
        "truncation": "disabled",
        "store": False,
    }
    nulls = dict.fromkeys(
        ["conversation", "prompt", "tools", "stop", "max_tool_calls", "previous_response_id"]
    )
    reply = client.responses.create(**GREEDY, extra_body={**hints, **nulls})
    assert reply.output_text == client.responses.create(**GREEDY).output_text


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier items in input"),
        ({"store": True}, "store", "not stored"),
        ({"background": True}, "background", "not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "Input should be 'function'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice", 'Must be "none", "auto", "required"'),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": 5}, "input", "a text or a list of items"),
        ({"input": [{"type": "function_call_output"}]}, "input.0.call_id", "this key is missing"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "there are no other items"),
        ({"input": [OUTPUT]}, "input", "Send the function_call too"),
        ({"truncation": "auto"}, "truncation", "shorten input"),
        ({"input": "a " * 5000}, "input", "This model's maximum context length is 4096 tokens"),
        (
            {"max_output_tokens": 10**6},
            "max_output_tokens",
            "This model's maximum context length is 4096 tokens",
        ),
        ({"conversation": "conv_1"}, "conversation", "send the earlier items in input"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode", "one mode of reasoning"),
        ({"include": ["all"]}, "include.0", "message.output_text.logprobs"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}, "strict": True}}},
            "text",
            r"not at text\.format\.schema",
        ),
    ],
)
def test_what_is_not_here_is_400_and_says_so(client, more, param, said):
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.responses.create(**{**GREEDY, **more})
    assert refused.value.param == param


def test_a_call_that_is_cut_is_the_same_streamed_and_whole_and_as_in_a_chat(client):
    choice = {"type": "function", "name": "add"}
    asked = {**GREEDY, "max_output_tokens": 4, "tools": [TOOL], "tool_choice": choice}
    reply = strict(Response, client.responses.create(**asked))
    *events, last = client.responses.create(**asked, stream=True)
    assert last.type == "response.incomplete"
    for found in (reply, strict(Response, last.response)):
        [call] = found.output
        assert (call.type, call.name, call.status) == ("function_call", "add", "incomplete")
        assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(call.arguments)
    done = [event.arguments for event in events if event.type.endswith("arguments.done")]
    written = "".join(event.delta for event in events if event.type.endswith("arguments.delta"))
    cut = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "the penstock"}],
        temperature=0,
        max_tokens=4,
        tools=[{"type": "function", "function": {**ADD["function"], "strict": True}}],
        tool_choice={"type": "function", "function": {"name": "add"}},
    ).choices[0]
    answers = [reply.output[0], last.response.output[0], cut.message.tool_calls[0].function]
    assert {*done, *(answer.arguments for answer in answers)} == {written}
    assert cut.finish_reason == "length"


UNUSABLE = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": UNUSABLE}}}, "text"),
        ({"tools": [{**NOW, "parameters": UNUSABLE}], "tool_choice": "required"}, "tools"),
    ],
    ids=["format", "tools"],
)  # fmt: skip
def test_a_grammar_that_cannot_be_used_names_its_key(client, more, param):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**GREEDY, **more)
    assert refused.value.param == param
