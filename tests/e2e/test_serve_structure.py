"""Answers that must follow something, asked with the client of OpenAI from a real server."""

import json
import re

import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.serving import strict

HELLO = [{"role": "user", "content": "the penstock"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["pump", "valve"]},
        "open": {"type": "boolean"},
    },
    "required": ["size", "kind", "open"],
    "additionalProperties": False,
}


def tool(name, parameters=None):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("measure", SCHEMA), tool("now")]


def ask(client, **more):
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "max_tokens": 300, **more})


def test_answers_follow_a_schema_alone_and_streamed(client):
    form = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA, "strict": True}}
    for choice in ask(client, response_format=form, n=16).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    chunks = list(ask(client, response_format=form, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_any_object_is_one(client):
    choices = ask(client, response_format={"type": "json_object"}, n=16).choices
    ended = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "regex", "regex": r"\d{4}-\d{2}"}, r"\d{4}-\d{2}"),
        ({"type": "choice", "choice": ["yes", "no"]}, "yes|no"),
        ({"type": "grammar", "grammar": 'start: "(" start ")" | "x"'}, r"\(*x\)*"),
    ],
    ids=["regex", "choice", "grammar"],
)
def test_completions_follow_other_forms(client, form, pattern):
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 300, "n": 8}
    for choice in client.completions.create(**asked, extra_body={"response_format": form}).choices:
        assert choice.finish_reason == "stop"
        assert re.fullmatch(pattern, choice.text)


def test_one_of_thousands_of_texts_can_be_chosen(client):
    form = {"type": "choice", "choice": [f"part {n}" for n in range(4000)]}
    asked = {"model": "tiny", "prompt": "the", "max_tokens": 50}
    text = client.completions.create(**asked, extra_body={"response_format": form}).choices[0].text
    assert text in form["choice"]


@pytest.mark.parametrize("several", [True, False])
def test_calls_that_are_required_are_made_with_valid_arguments(client, several):
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": several}
    choices = ask(client, **asked, n=16, seed=1, max_tokens=1000).choices
    ended = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    calls = [call for choice in ended for call in choice.message.tool_calls]
    assert several == (len(calls) > len(ended))
    assert len(ended) == 16 or several  # a list may be cut, as any answer
    for call in calls:
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, {"measure": SCHEMA, "now": {"const": {}}}[call.function.name])


def test_an_answer_with_tools_and_a_schema_is_a_call_or_follows_the_schema(client, http):
    form = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
    asked = {"tools": TOOLS[1:], "response_format": form, "parallel_tool_calls": False}
    for word, kind in (("name", "tool_calls"), ("size", "stop")):
        starts = [f"{before}{word[:n]}" for before in ("", '"') for n in range(1, 5)]
        ids = {http.post("/tokenize", json={"prompt": text}).json()["tokens"][-1] for text in starts}
        for choice in ask(client, **asked, logit_bias={str(token): 100 for token in ids}, n=4).choices:
            assert choice.finish_reason == kind
            for call in choice.message.tool_calls or ():
                assert call.function.name == "now"
            if kind == "stop":
                jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    assert ask(client, **asked, tool_choice="required").choices[0].finish_reason == "tool_calls"


def test_a_named_function_is_called(client):
    wanted = {"type": "function", "function": {"name": "measure"}}
    for choice in ask(client, tools=TOOLS, tool_choice=wanted, n=4).choices:
        (call,) = choice.message.tool_calls
        assert call.function.name == "measure"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_of_the_allowed_tools_alone_one_is_called_and_the_model_is_told_of_all(client):
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    asked = {"tools": TOOLS, "parallel_tool_calls": False}
    reply = ask(client, **asked, tool_choice=choice, n=8)
    strict(ChatCompletion, reply)
    called = [call.function.name for one in reply.choices for call in one.message.tool_calls]
    assert called == ["now"] * 8
    assert reply.usage.prompt_tokens == ask(client, **asked, tool_choice="required").usage.prompt_tokens


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "regex", "regex": "("}, "cannot be used: unclosed group"),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "whole"}}},
            "Invalid type: whole",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}, "strict": True}},
            "got 'not at response_format.json_schema.schema'",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"maximum": 3 * 2**90}}},
            "3713820117856140824697372672",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [-(10**25), 1]}}},
            "cannot be used",
        ),
        ({"type": "grammar", "grammar": "start: " + "(" * 60_000}, "nested"),
        ({"type": "regex", "regex": "a" * 70_000}, "too long"),
    ],
    ids=["regex", "type", "not", "maximum", "enum", "deep", "long"],
)
def test_what_cannot_be_followed_is_400_with_the_reason(client, form, said):
    with pytest.raises(openai.BadRequestError, match=said):
        ask(client, response_format=form)


def test_what_turns_out_too_large_on_the_way_is_400_alone_and_an_error_in_a_stream(client):
    form = {"type": "regex", "regex": "a*b*" * 400 + "c"}
    asked = {"response_format": form, "n": 4, "logit_bias": {"97": 100, "98": 100}}
    with pytest.raises(openai.BadRequestError, match=r"could not be followed: .*Simplify it") as alone:
        ask(client, **asked)
    assert alone.value.code == "cannot_be_followed"
    with pytest.raises(openai.APIError, match="could not be followed") as streamed:
        list(ask(client, **asked, stream=True))
    assert streamed.value.code == "cannot_be_followed"
    assert ask(client).choices


def test_a_schema_of_a_thousand_links_does_not_end_the_server(tiny_server, client):
    links = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(900)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**links, "d900": {"type": "null"}}}
    form = {"type": "json_schema", "json_schema": {"name": "deep", "schema": schema}}
    assert ask(client, response_format=form, max_tokens=3).choices[0].finish_reason in ("length", "stop")
    assert tiny_server.process.poll() is None


def test_an_end_that_is_to_be_ignored_does_not_go_with_a_grammar(client):
    with pytest.raises(openai.BadRequestError, match="ends with the model's end token"):
        ask(client, response_format={"type": "json_object"}, extra_body={"ignore_eos": True})


LOOSE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
MISSED = "uniqueItems at {}.properties.a"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("strict", [None, False])
def test_keywords_that_are_not_enforced_are_named_in_a_header(http, stream, strict):
    schema = {"name": "x", "schema": LOOSE} | ({} if strict is None else {"strict": strict})
    asked = {"messages": HELLO, "max_tokens": 2, "stream": stream}
    form = {"response_format": {"type": "json_schema", "json_schema": schema}}
    call = {"tools": [tool("now"), tool("f", LOOSE)], "tool_choice": "required"}
    function = {"type": "function", "name": "f", "parameters": LOOSE, "strict": False}
    response = {"input": "a", "stream": stream, "tools": [function], "max_output_tokens": 16}
    text = {"format": {"type": "json_schema", **schema}}
    for path, body, at in (
        ("/v1/chat/completions", asked | form, "response_format.json_schema.schema"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": stream, "guided_json": LOOSE},
         "guided_json"),
        ("/v1/chat/completions", asked | call, "tools[1].function.parameters"),
        ("/v1/chat/completions", asked | call | {"tool_choice": "auto"}, None),
        ("/v1/responses", response | {"tool_choice": "required"}, "tools[0].parameters"),
        ("/v1/responses", {"input": "a", "stream": stream, "text": text, "max_output_tokens": 16},
         "text.format.schema"),
    ):  # fmt: skip
        reply, names = http.post(path, json=body), at and MISSED.format(at)
        assert (reply.status_code, reply.headers.get("X-Penstock-Not-Enforced")) == (200, names)


@pytest.mark.parametrize("strict", [{"strict": True}, {}, {"strict": None}], ids=["true", "absent", "null"])
def test_keywords_that_are_not_enforced_are_refused_where_a_function_is_strict(http, strict):
    """On `/v1/responses` it is strict unless it says otherwise, as OpenAI's API has it."""
    function = {"type": "function", "name": "f", "parameters": LOOSE, **strict}
    body = {"input": "a", "tools": [function], "tool_choice": "required"}
    reply = http.post("/v1/responses", json=body)
    assert reply.status_code == 400
    assert MISSED.format("tools[0].parameters") in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == "tools"
    assert http.post("/v1/responses", json=body | {"tool_choice": "auto", "max_output_tokens": 16}).is_success


def wrong(part, **more):
    """Return a schema whose property d is wrong."""
    return {"type": "object", "properties": {"c": {"type": "integer"}, "d": part}, "required": ["d"], **more}


WRONG = [
    (wrong({"type": "whole"}), "properties.d", "Invalid type: whole"),
    (wrong({"items": {"$ref": "#/$defs/x"}, "type": "array"}, **{"$defs": {"x": {"pattern": "("}}}),
     "properties.d.items", "unclosed group"),
    (wrong({"anyOf": [{"type": "null"}, {"enum": 5}]}), "properties.d.anyOf[1]", "enum must be an array"),
    ({"type": "array"}, "", "The arguments of a function are an object"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "below", "why"), WRONG)
def test_a_schema_that_cannot_be_used_is_named_and_the_other_tools_are_called(http, schema, below, why):
    tools = [tool("f", schema), tool("measure", SCHEMA), tool("g", schema)]
    asked = {"messages": HELLO, "max_tokens": 300, "tools": tools}
    reply = http.post("/v1/chat/completions", json=asked | {"tool_choice": "required"})
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"][:1]
    assert call["function"]["name"] == "measure"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    named = reply.headers["X-Penstock-Not-Enforced"]
    for index, name in ((0, "f"), (2, "g")):
        assert f"tools[{index}].function.parameters{below and f'.{below}'} cannot be used: " in named
        assert f"('{name}' is not called)" in named
    measure = {"type": "function", "function": {"name": "measure"}}
    assert (
        "X-Penstock-Not-Enforced"
        not in http.post("/v1/chat/completions", json=asked | {"tool_choice": measure})
        .raise_for_status()
        .headers
    )
    strict_one = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    for choice, offered in (
        ("required", [tool("f", schema)]),
        ({"type": "function", "function": {"name": "f"}}, tools),
        ("required", [*tools[1:], strict_one]),
    ):
        refused = http.post("/v1/chat/completions", json=asked | {"tool_choice": choice, "tools": offered})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "tools")
        assert why in error["message"]


@pytest.mark.parametrize(("schema", "below", "why"), WRONG[:3])
def test_a_part_of_a_response_format_that_cannot_be_used_is_named(http, schema, below, why):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    for path, body, at, param in (
        ("/v1/chat/completions", {"messages": HELLO, "response_format": form},
         "response_format.json_schema.schema", "response_format"),
        ("/v1/completions", {"prompt": "a", "guided_json": schema}, "guided_json", "guided_json"),
        ("/v1/responses", {"input": "a", "text": text}, "text.format.schema", "text"),
    ):  # fmt: skip
        refused = http.post(path, json=body)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, param)
        assert f"{at}.{below} cannot be used: " in error["message"]
        assert why in error["message"]


def test_a_stop_text_and_a_stop_token_are_the_reason_and_the_models_end_is_none(client, http):
    asked = {"prompt": "the penstock", "max_tokens": 64, "temperature": 0}
    text = http.post("/v1/completions", json=asked | {"ignore_eos": True}).json()["choices"][0]["text"]
    stopped = http.post("/v1/completions", json=asked | {"ignore_eos": True, "stop": [text[3:5]]}).json()
    assert stopped["choices"][0]["stop_reason"] == text[3:5]
    form = {"response_format": {"type": "regex", "regex": "ab+c"}}
    chats = {"messages": HELLO, "max_tokens": 64}
    for more, reason in (({"stop": "b"}, "b"), ({}, None)):
        choice = http.post("/v1/chat/completions", json=chats | form | more).json()["choices"][0]
        assert (choice["finish_reason"], choice.get("stop_reason")) == ("stop", reason)
    streamed = ask(client, **form, stop="b", stream=True)
    assert [chunk.choices[0].stop_reason for chunk in streamed if chunk.choices[0].finish_reason] == ["b"]
    (b,) = http.post("/tokenize", json={"prompt": "b", "add_special_tokens": False}).json()["tokens"]
    once = http.post("/v1/completions", json={"prompt": "a", "stop_token_ids": [b], "allowed_token_ids": [b]})
    assert once.json()["choices"][0]["stop_reason"] == b
