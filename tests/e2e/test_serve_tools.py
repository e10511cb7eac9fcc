"""Calls of tools with tokenizers that hold the marks of calls as added tokens, as each family's does."""

import json

import jsonschema
import pytest

from tests.serving import ADD, HELLO, serving
from tests.tiny_models import save_reciter

GO = "<|go|>"
TEMPLATE = (
    "{# a call is written so: MARKS #}{% for message in messages %}{{ message.content }}{% endfor %}" + GO
)
ARGUMENTS = ('{"a": 1,', ' "big": true}')
HERMES = ("<tool_call>", '\n{"name": "add", "arguments": ', *ARGUMENTS, "}\n", "</tool_call>")
MISTRAL = ("[TOOL_CALLS]", '[{"name": "add", "arguments": ', *ARGUMENTS, "}]")
NAMES = ("[TOOL_CALLS]", "add", "[CALL_ID]", "a1B2c3D4e", "[ARGS]", *ARGUMENTS)
CODER = (
    "<tool_call>",
    "\n<function=add>\n",
    "<parameter=a>\n1\n</parameter>\n",
    "<parameter=big>\ntrue\n</parameter>\n",
    "</function>\n",
    "</tool_call>",
)
DEEPSEEK = tuple(
    part.replace("|", "\uff5c").replace("_", "\u2581") if part.startswith("<|") else part
    for part in (
        *("<|tool_calls_begin|>", "<|tool_call_begin|>", "function", "<|tool_sep|>", "add\n```json\n"),
        *(*ARGUMENTS, "\n```", "<|tool_call_end|>", "<|tool_calls_end|>"),
    )
)
SCRIPTS = {
    "llama 3": ('{"name": "add", "parameters": ', *ARGUMENTS, "}"),
    "hermes, qwen 2.5 and 3, granite 4": ("Sure. ", *HERMES),
    "granite 3": ("Sure. ", "<|tool_call|>", *MISTRAL[1:]),
    "mistral": ("Sure. ", *MISTRAL),
    "mistral since 2025": ("Sure. ", *NAMES),
    "qwen 3 coder": ("Sure. ", *CODER),
    "deepseek": ("Sure. ", *DEEPSEEK),
}


def marks_of(script):
    """Return the parts that are one token in the tokenizers of these models."""
    bracketed = [part for part in script if part[0] + part[-1] in ("<>", "[]")]
    return [part for part in bracketed if not {"\n", '"'} & set(part)]


KINDS = [
    (name, special) for name in SCRIPTS for special in (True, False) if special or marks_of(SCRIPTS[name])
]


@pytest.fixture(scope="module", params=KINDS, ids=str)
def family(request, tmp_path_factory):
    name, special = request.param
    script, folder = SCRIPTS[name], tmp_path_factory.mktemp("family") / "tiny"
    save_reciter(folder, script, after=GO, special=marks_of(script) if special else ())
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("MARKS", "".join(marks_of(script))))
    with serving(folder, "--cache-gib", "0.05") as running, running.openai() as client:
        yield name, client


def ask(client, **more):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": HELLO, "tools": [ADD], "seed": 1, **more}
    )


def streamed(client, **more):
    """Return the words, calls as [name, arguments], the pieces of arguments and why the answer ended."""
    words, calls, pieces, finish = "", [], [], None
    for chunk in ask(client, stream=True, **more):
        [choice] = chunk.choices
        words, finish = words + (choice.delta.content or ""), choice.finish_reason
        for delta in choice.delta.tool_calls or ():
            if delta.function.name:
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments
            pieces.append(delta.function.arguments)
    return words, calls, [piece for piece in pieces if piece], finish


def test_a_call_that_the_model_makes_by_itself_is_found(family):
    name, client = family
    choice = ask(client, temperature=0).choices[0]
    [call] = choice.message.tool_calls
    said = "" if name == "llama 3" else "Sure. "
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "big": True})
    assert (choice.message.content or "", choice.finish_reason) == (said, "tool_calls")
    words, calls, pieces, finish = streamed(client, temperature=0)
    assert (words, calls, finish) == (said, [["add", call.function.arguments]], "tool_calls")
    assert len(pieces) >= 2


@pytest.mark.parametrize("several", [True, False])
def test_calls_that_must_be_made_are(family, several):
    asked = {"tool_choice": "required", "parallel_tool_calls": several, "max_tokens": 2000}
    whole = ask(family[1], **asked).choices[0]
    words, calls, pieces, finish = streamed(family[1], **asked)
    assert (whole.finish_reason, finish, words) == ("tool_calls", "tool_calls", "")
    assert [[call.function.name, call.function.arguments] for call in whole.message.tool_calls] == calls
    assert several or len(calls) == 1
    assert len(pieces) > len(calls)
    for name, arguments in calls:
        assert name == "add"
        jsonschema.validate(json.loads(arguments), ADD["function"]["parameters"])


def test_a_named_tool_is_called(family):
    asked = {"tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 300}
    [call] = ask(family[1], **asked).choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), ADD["function"]["parameters"])
    words, calls, pieces, _ = streamed(family[1], **asked)
    assert (words, calls) == ("", [["add", call.function.arguments]])
    assert len(pieces) > 1


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "add"}}])
def test_a_call_that_is_cut_is_the_same_streamed_and_whole(family, choice):
    few = {"auto": 4, "required": 3}.get(str(choice), 1) - (family[0] == "llama 3" and choice == "auto") * 2
    asked = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 0, "max_tokens": few}
    cut = ask(family[1], **asked).choices[0]
    calls = [[call.function.name, call.function.arguments] for call in cut.message.tool_calls or ()]
    words, streamed_calls, _, finish = streamed(family[1], **asked)
    assert cut.finish_reason == finish == "length"
    assert (words, streamed_calls) == (cut.message.content or "", calls)
    for _, arguments in calls:
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            json.loads(arguments)


def test_a_call_or_a_form_can_be_chosen(family):
    form = {"type": "json_schema", "json_schema": {"name": "size", "schema": {"type": "integer"}}}
    reply = ask(family[1], response_format=form, parallel_tool_calls=False, max_tokens=300, n=16)
    for choice in reply.choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), int)
    assert {choice.finish_reason for choice in reply.choices} <= {"stop", "tool_calls", "length"}
