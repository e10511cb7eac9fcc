"""Requests as clients of agents send them, by plain HTTP; `make soak PART=agents` runs the clients."""

import json

import pytest

from tests.serving import ADD

SCHEMA = {
    "type": "object",
    "properties": {"open": {"type": "boolean"}},
    "required": ["open"],
    "additionalProperties": False,
}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "the penstock"}],
    "temperature": 0,
    "max_completion_tokens": 60,
    "verbosity": "low",
    "store": True,
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "functions": None,
    "audio": None,
}
RESPONSE = {
    "model": "tiny",
    "instructions": "Be brief.",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "the penstock"}]}],
    "temperature": 0,
    "max_output_tokens": 60,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto", "effort": None},
    "text": {"verbosity": "low"},
    "store": False,
    "truncation": "disabled",
    "prompt_cache_retention": "in_memory",
    "previous_response_id": None,
    "conversation": None,
}
FORM = {"name": "state", "schema": SCHEMA, "strict": True}
TOOL = {"type": "function", **ADD["function"], "strict": True}
KINDS = {
    "plain": ({}, {}),
    "tool": (
        {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": FORM}},
        {"text": {"format": {"type": "json_schema", **FORM}, "verbosity": "low"}},
    ),
}


def events(reply):
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def post(http, route, body):
    reply = http.post(f"/v1/{route}", json=body)
    assert reply.status_code == 200, reply.text
    return reply


def said(kind, text, arguments):
    """Return what was said, held against what was asked for."""
    if kind == "tool":
        assert set(json.loads(arguments)) == {"a", "big"}
        return arguments
    if kind == "json_schema":
        assert isinstance(json.loads(text)["open"], bool)
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_a_chat_is_answered_streamed_and_whole(http, kind):
    body = {**CHAT, **KINDS[kind][0]}
    message = post(http, "chat/completions", body).json()["choices"][0]["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
    streamed = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": None},
    }
    chunks = events(post(http, "chat/completions", streamed))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    text = "".join(delta.get("content") or "" for delta in deltas)
    written = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert said(kind, text, "".join(written)) == said(kind, message["content"], "".join(calls))
    assert ("content" in deltas[0]) == (kind != "tool")
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_response_is_answered_streamed_and_whole(http, kind):
    body = {**RESPONSE, **KINDS[kind][1]}
    [item] = post(http, "responses", body).json()["output"]
    found = events(post(http, "responses", {**body, "stream": True}))
    deltas = "".join(event["delta"] for event in found if event["type"].endswith(".delta"))
    arguments = item.get("arguments")
    text = None if kind == "tool" else item["content"][0]["text"]
    assert said(kind, text, arguments) == deltas


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("most", [1, 6, 14])
def test_a_required_call_that_is_cut_is_a_call_on_both_routes(http, most, streams):
    chats = {**CHAT, "max_completion_tokens": most, "tools": [ADD], "tool_choice": "required"}
    answers = {**RESPONSE, "max_output_tokens": most, "tools": [TOOL], "tool_choice": "required"}
    chat = post(http, "chat/completions", {**chats, "stream": streams})
    response = post(http, "responses", {**answers, "stream": streams})
    if streams:
        choices = [chunk["choices"][0] for chunk in events(chat)]
        deltas = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        names = [call["function"]["name"] for call in deltas if "name" in call["function"]]
        assert not any("content" in choice["delta"] for choice in choices)
        finish, whole = choices[-1]["finish_reason"], events(response)[-1]["response"]
    else:
        [choice] = chat.json()["choices"]
        names = [call["function"]["name"] for call in choice["message"]["tool_calls"]]
        assert choice["message"]["content"] is None
        finish, whole = choice["finish_reason"], response.json()
    assert (names, finish) == (["add"], "length")
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["name"], item["status"]) for item in whole["output"]] == [
        ("function_call", "add", "incomplete")
    ]
