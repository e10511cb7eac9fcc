"""`/v1/responses`, asked with the client of OpenAI and held against its types."""

import json

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.serving import strict

SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
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


@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the earlier messages in input"),
        ({"store": True}, "store", "not kept"),
        ({"background": True}, "background", "while the client waits"),
        ({"tools": [{"type": "web_search"}]}, "tools", "at /v1/chat/completions only"),
        ({"input": []}, "input", "Must be a text or a list of messages"),
        ({"input": [{"type": "function_call_output"}]}, "input", "there are no other items"),
        ({"input": "a " * 5000}, "input", "fills the model's context"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "do not fit the context"),
        ({"conversation": "conv_1"}, "conversation", "this key is not known"),
        ({"reasoning": {"effort": "low"}}, "reasoning", "leave reasoning out"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "leave include out"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, None, "Unimplem"),
    ],
)
def test_what_is_not_here_is_400_and_says_so(client, more, param, said):
    with pytest.raises(openai.BadRequestError, match=said) as refused:
        client.responses.create(**{**GREEDY, **more})
    assert refused.value.param == param
