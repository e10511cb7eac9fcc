"""What clients of vLLM's server send besides OpenAI's API."""

import json

import openai
import pytest

from penstock import __version__
from tests.serving import HELLO, TEMPLATE, make_model, serving

CHAT = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12}
TEXT = {"model": "tiny", "prompt": "the penstock", "temperature": 0, "max_tokens": 12}


def text_of(http, **asked):
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_an_answer_goes_on_with_the_last_message(client, http):
    begun = [*HELLO, {"role": "assistant", "content": "Sure."}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    asked = {**CHAT, "messages": begun, "extra_body": {**goes_on, "ignore_eos": True}}
    reply = client.chat.completions.create(**asked)
    ids = http.post("/tokenize", json={"messages": begun, **goes_on}).json()["tokens"]
    plain = client.completions.create(**{**TEXT, "prompt": ids}, extra_body={"ignore_eos": True})
    assert reply.choices[0].message.content == plain.choices[0].text
    assert reply.usage.prompt_tokens == len(ids)


def test_a_prompt_ends_where_it_is_told_to(http):
    said = [HELLO[1], {"role": "assistant", "content": "Sure. "}]
    begun = "<|user|>the penstock<|end|><|assistant|>Sure. "
    assert text_of(http, messages=said, continue_final_message=True, add_generation_prompt=False) == begun
    assert text_of(http, messages=said, add_generation_prompt=False) == f"{begun}<|end|>"
    assert text_of(http, messages=said) == f"{begun}<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("more", "param", "why"),
    [
        ({"continue_final_message": True}, "continue_final_message", "got a message of 'user'"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
            "not both",
        ),
        ({"skip_special_tokens": False}, "skip_special_tokens", "Answers have no special tokens"),
        ({"guided_regex": "("}, "guided_regex", "cannot be used: unclosed group"),
        ({"use_beam_search": True}, "use_beam_search", "There is no beam search"),
        ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ],
)
def test_what_cannot_be_is_400_by_its_own_name(client, more, param, why):
    with pytest.raises(openai.BadRequestError, match=why) as refused:
        client.chat.completions.create(**CHAT, extra_body=more)
    assert refused.value.param == param


def test_forms_go_by_the_names_of_vllm(client):
    for form in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
        chat = client.chat.completions.create(**CHAT, extra_body=form).choices[0].message.content
        plain = client.completions.create(**TEXT, extra_body=form).choices[0].text
        assert {chat, plain} <= {"yes", "no"}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    found = client.chat.completions.create(**CHAT, extra_body={"guided_json": json.dumps(schema)})
    assert set(json.loads(found.choices[0].message.content)) == {"a"}


def test_every_chunk_counts_where_that_is_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    ends = {"ignore_eos": True}
    chats = list(client.chat.completions.create(**CHAT, stream=True, stream_options=options, extra_body=ends))
    texts = list(client.completions.create(**TEXT, stream=True, stream_options=options, extra_body=ends))
    for chunks in (chats[1:], texts):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert (counts, counts[-1]) == (sorted(counts), 12)
        assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1


def test_what_is_computed_of_a_prompt_is_found_with_the_same_salt_alone(client):
    asked = {**TEXT, "prompt": "the turbine feeds " * 20}

    def found(**more):
        usage = client.completions.create(**asked, extra_body=more).usage
        return usage.prompt_tokens_details.cached_tokens

    assert [found(cache_salt="a") > 0 for _ in range(2)] == [False, True]
    assert found(cache_salt="b") == 0
    assert found() == 0


def test_the_version_and_the_load_are_told(http):
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/load").json() == {"server_load": 0}


def test_what_a_template_lets_a_model_think_first_is_no_content(tmp_path):
    folder = make_model(tmp_path / "tiny", template=f"{TEMPLATE}<think>\n")
    with (
        serving(folder, "--cache-gib", "0.01", "--split-reasoning") as running,
        running.openai() as client,
    ):
        asked = {**CHAT, "extra_body": {"ignore_eos": True}}
        message = client.chat.completions.create(**asked).choices[0].message
        assert (message.content, bool(message.reasoning_content)) == ("", True)
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True)]
        thought = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert thought == message.reasoning_content
        form = {"guided_choice": ["yes", "no"]}
        assert client.chat.completions.create(**CHAT, extra_body=form).choices[0].message.content in (
            "yes",
            "no",
        )
