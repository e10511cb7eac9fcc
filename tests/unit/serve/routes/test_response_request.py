"""Items of `/v1/responses` as the messages of a chat, and what a server that keeps nothing refuses."""

import pytest
from pydantic import ValidationError

from penstock.serve.errors import ApiError
from penstock.serve.routes.responses import chat_of
from penstock.serve.schema.responses import ResponsesRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "default": None}, "strict": True}


def chat(*items, **more):
    return chat_of(ResponsesRequest.model_validate({"input": list(items), **more}))


def said(text):
    return {"role": "assistant", "content": text}


def turns(*items):
    return [
        (turn.role, turn.content, [call.id for call in getattr(turn, "tool_calls", None) or ()])
        for turn in chat({"role": "user", "content": "hi"}, *items).messages[1:]
    ]


def test_calls_are_part_of_the_turn_that_made_them():
    second = {**CALL, "call_id": "c2"}
    assert turns(said("Sure."), CALL, second, OUTPUT, {**OUTPUT, "call_id": "c2"}, said("Two.")) == [
        ("assistant", "Sure.", ["c1", "c2"]),
        ("tool", "2", []),
        ("tool", "2", []),
        ("assistant", "Two.", []),
    ]


@pytest.mark.parametrize("items", [[CALL, OUTPUT], [CALL, said("Wait."), OUTPUT]])
def test_an_answer_of_calls_is_one_turn_wherever_its_words_stand(items):
    answer, output = turns(*items)
    assert (answer[0], answer[2], output) == ("assistant", ["c1"], ("tool", "2", []))


def test_an_output_has_the_name_of_its_function_and_may_come_in_parts():
    parts = [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "2"}]
    output = chat(CALL, {**OUTPUT, "output": parts}).messages[-1]
    assert (output.name, output.content, output.tool_call_id) == ("add", "12", "c1")


def test_an_output_without_its_call_is_refused():
    with pytest.raises(ApiError, match=r"the output of a call 'c9' that is not before it\.") as refused:
        chat(CALL, {**OUTPUT, "call_id": "c9"})
    assert refused.value.param == "input"


@pytest.mark.parametrize(
    ("choice", "chats"),
    [
        (None, None),
        ("required", "required"),
        ({"type": "function", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "add"}}],
                },
            },
        ),
    ],
)
def test_tools_are_those_of_a_chat(choice, chats):
    asked = chat(said("a"), tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    written = asked.model_dump(exclude_none=True)
    function = {"name": "add", "parameters": TOOL["parameters"], "strict": True}
    assert written["tools"] == [{"type": "function", "function": function}]
    assert (written.get("tool_choice"), asked.parallel_tool_calls) == (chats, False)


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "a"}, {"type": 5}])
def test_other_items_are_told_which_there_are(item):
    with pytest.raises(ValidationError, match='Must have the type "message", "function_call"'):
        chat(item)
