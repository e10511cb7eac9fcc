"""Every parameter of the published API has one fate, held against the types of the openai package."""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import (
    FunctionToolParam,
    ResponseIncludable,
    ResponseTextConfigParam,
    response_create_params,
)
from openai.types.shared_params import Reasoning as ReasoningParam
from pydantic import ValidationError

from penstock.serve.parameters import Hint, RefusedParameter
from penstock.serve.routes.responses import chat_of
from penstock.serve.schema import base, chat, completions, responses

PUBLISHED = {
    completions.CompletionRequest: completion_create_params.CompletionCreateParamsStreaming,
    chat.ChatRequest: chat_params.CompletionCreateParamsStreaming,
    base.StreamOptions: ChatCompletionStreamOptionsParam,
    responses.ResponsesRequest: response_create_params.ResponseCreateParamsStreaming,
    responses.TextConfig: ResponseTextConfigParam,
    responses.Reasoning: ReasoningParam,
    responses.ResponseTool: FunctionToolParam,
}
MISPLACED = {
    completions.CompletionRequest: {*chat_params.CompletionCreateParamsBase.__annotations__},
    responses.ResponsesRequest: {"n"},
}
"""Keys of another route, which clients send here too."""
VLLM = {
    "add_special_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "use_beam_search",
}
LEAST = {
    completions.CompletionRequest: {"prompt": "a"},
    chat.ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    responses.ResponsesRequest: {"input": "a"},
    responses.ResponseTool: {"type": "function", "name": "f"},
}
ROWS = [(body, key, fate) for body in PUBLISHED for key, fate in body.not_honoured.items()]
HINTS = [(body, key) for body, key, fate in ROWS if isinstance(fate, Hint)]
REFUSED = [row for row in ROWS if isinstance(row[2], RefusedParameter)]


def named(part):
    return part if isinstance(part, str) else getattr(part, "__name__", "")


NESTED = {
    chat.ChatRequest: {"": chat.ChatRequest, "stream_options.": base.StreamOptions},
    responses.ResponsesRequest: {
        "": responses.ResponsesRequest,
        "reasoning.": responses.Reasoning,
        "text.": responses.TextConfig,
        "tools[].": responses.ResponseTool,
    },
}
PAGE = Path(__file__).parents[3] / "docs/how-to/use-with-agents-and-tools.md"


def fates_of(request):
    """Return (fate, remark) of each key."""
    found = {}
    for before, body in NESTED[request].items():
        for key in sorted({*keys_of(body), *body.not_honoured}):
            fate = body.not_honoured.get(key)
            if isinstance(fate, Hint):
                found[before + key] = "hint", fate.why
            elif isinstance(fate, RefusedParameter):
                same = " or ".join(f"`{json.dumps(one)}`" for one in fate.unless)
                found[before + key] = "refused", f"{f'Except {same}. ' if same else ''}{fate.why}"
            else:
                found[before + key] = "honoured", ""
    return found


def table():
    chats, answers = fates_of(chat.ChatRequest), fates_of(responses.ResponsesRequest)
    rows = ["| parameter | chat | responses | remark |", "|---|---|---|---|"]
    for key in sorted({*chats, *answers}):
        (of_chat, why), (of_response, other) = chats.get(key, ("", "")), answers.get(key, ("", ""))
        remarks = " / ".join(dict.fromkeys(said for said in (why, other) if said))
        rows.append(f"| `{key}` | {of_chat} | {of_response} | {remarks} |")
    return "\n".join(rows)


def test_the_page_has_the_table():
    assert f"\n{table()}\n" in PAGE.read_text(), table()


def bodies_of(parent):
    for body in parent.__subclasses__():
        yield body
        yield from bodies_of(body)


def keys_of(body):
    return {field.alias or name for name, field in body.model_fields.items()}


@pytest.mark.parametrize("body", PUBLISHED, ids=lambda body: body.__name__)
def test_each_published_parameter_has_one_fate_and_no_table_names_another(body):
    published = set(get_type_hints(PUBLISHED[body]))
    honoured, others = keys_of(body), set(body.not_honoured)
    assert not honoured & others
    assert published <= honoured | others
    assert others <= published | VLLM | MISPLACED.get(body, set())


def test_what_a_response_includes_is_published():
    assert set(get_args(responses.Include)) == set(get_args(ResponseIncludable))


@pytest.mark.parametrize(("body", "key"), HINTS, ids=named)
def test_a_hint_is_accepted_with_any_value_and_changes_nothing(body, key):
    least = LEAST.get(body, {})
    for value in (None, "x", 5, True, {"a": [None]}):
        assert body.model_validate({**least, key: value}) == body.model_validate(least)


@pytest.mark.parametrize(("body", "key", "fate"), REFUSED, ids=named)
def test_what_is_refused_is_refused_by_name_and_its_default_is_not(body, key, fate):
    least = LEAST.get(body, {})
    for value in (0, 2, "x", {"a": 1}):
        with pytest.raises(ValidationError) as refused:
            body.model_validate({**least, key: value})
        [error] = refused.value.errors()
        assert (error["msg"], error["ctx"]["key"], error["ctx"]["given"]) == (fate.why, key, value)
    for same in (None, *fate.unless):
        assert body.model_validate({**least, key: same}) == body.model_validate(least)


def test_a_misspelt_key_is_refused_with_null_too():
    with pytest.raises(ValidationError, match="temprature"):
        chat.ChatRequest.model_validate({**LEAST[chat.ChatRequest], "temprature": None})


def test_a_default_is_compared_by_value_and_apart_from_booleans():
    least = LEAST[responses.ResponsesRequest]
    responses.ResponsesRequest.model_validate({**least, "n": 1.0})
    for key, value in (("n", True), ("store", 0), ("store", 0.0)):
        with pytest.raises(ValidationError):
            responses.ResponsesRequest.model_validate({**least, key: value})


@pytest.mark.parametrize("body", list(bodies_of(base.Body)), ids=lambda body: body.__name__)
def test_null_is_an_absent_key(body):
    optional = [field.alias or name for name, field in body.model_fields.items() if not field.is_required()]
    if len(optional) == len(body.model_fields):
        body.model_validate(dict.fromkeys(optional))
        return
    with pytest.raises(ValidationError) as refused:
        body.model_validate(dict.fromkeys(optional))
    assert {error["type"] for error in refused.value.errors()} == {"missing"}


SAMPLES = {
    "truncate_prompt_tokens": 9,
    "truncation_side": "right",
    "model": "m",
    "stop": ["a", "b"],
    "seed": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "logit_bias": {"5": 2.0},
    "top_k": 4,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "stop_token_ids": [7],
    "allowed_token_ids": [7, 8],
    "bad_words": ["no"],
    "ignore_eos": True,
    "priority": 2,
    "cache_salt": "s",
    "structured_outputs": {"regex": "a"},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "g",
    "chat_template_kwargs": {"loud": None},
    "documents": [{"text": None}],
    "parallel_tool_calls": False,
}


def test_settings_of_a_chat_mean_the_same_in_a_response():
    asked = chat_of(responses.ResponsesRequest.model_validate({"input": "a", **SAMPLES}))
    told = chat.ChatRequest.model_validate({**LEAST[chat.ChatRequest], **SAMPLES})
    assert {key: getattr(asked, key) for key in SAMPLES} == {key: getattr(told, key) for key in SAMPLES}
    only_chat = keys_of(chat.ChatRequest) - keys_of(responses.ResponsesRequest)
    assert only_chat == {
        *(
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "reasoning_effort",
            "response_format",
        ),  # renamed
        *("stream_options", "n", "modalities", "logprobs"),
        *("logprob_token_ids", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        *("add_generation_prompt", "continue_final_message", "echo"),
    }
    assert set(SAMPLES) >= set(base.SamplingSettings.model_fields)
