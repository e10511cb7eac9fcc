"""What the engine is asked for what a client sent."""

from dataclasses import replace

import pytest

from penstock.core.errors import UsageError
from penstock.engine.text_processor import TextProcessor
from penstock.serve.engine_request import RouteOptions, check_logprobs, engine_request
from penstock.serve.errors import ApiError
from penstock.serve.limits import ServerLimits
from penstock.serve.schema.base import Generation
from penstock.serve.state import ModelInfo
from penstock.serve.token_strings import TokenNames
from penstock.text.template_process import TemplateProcess
from penstock.text.tokenizer import train_tokenizer

WORDS = TextProcessor(tokenizer=train_tokenizer(["penstock"] * 3, vocab_size=260), stop_ids=frozenset({0}))
PLAIN = ModelInfo(
    name="m",
    text_processor=WORDS,
    templates=TemplateProcess(WORDS.template),
    names=TokenNames(WORDS.tokenizer),
    context=100,
    vocab_size=260,
)
SERVED = replace(PLAIN, adapters={"legal": replace(PLAIN, name="legal", adapter="legal", vocab_size=264)})


def asked(*, max_tokens=None, limits=None, prompt=(1, 2, 3), stop_texts=(), served=SERVED, **body):
    return engine_request(
        Generation.model_validate(body),
        prompt,
        RouteOptions(max_tokens=max_tokens, stop_texts=stop_texts),
        served=served,
        limits=limits or ServerLimits(deadline_s=5),
        client="alice",
        now_s=10.0,
    )


def test_what_is_left_out_is_as_the_api_has_it():
    request, other = asked(), asked()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, None, 0.0)
    assert (request.max_tokens, request.num_answers, request.stop_ids) == (97, 1, {0})
    assert (request.client, request.deadline_s, request.adapter) == ("alice", 15.0, None)
    assert sampling.seed != other.sampling.seed


def test_what_is_left_out_is_as_the_model_recommends():
    own = replace(WORDS, sampling={"temperature": 0.6, "top_k": 20, "min_p": 0.1}).default_sampling
    served = replace(SERVED, sampling=own)
    sampling = asked(served=served).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 1.0, 0.1)
    sampling = asked(served=served, temperature=0, top_k=-1, min_p=0).sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0, None, 0)


def test_recommendations_by_which_nothing_could_be_drawn_are_refused():
    with pytest.raises(UsageError, match=r"generation_config.json: top_p .*--api-sampling"):
        _ = replace(WORDS, sampling={"top_p": 1.5}).default_sampling


def test_every_setting_arrives():
    request = asked(
        max_tokens=7,
        model="legal",
        n=3,
        seed=-5,
        temperature=0,
        top_p=0.5,
        top_k=9,
        min_p=0.1,
        presence_penalty=1.5,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        min_tokens=2,
        logit_bias={"17": -3.5},
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        priority=4,
        stop_texts=("\nUser:",),
    )
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.5, -1.5)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.seed) == (1.2, 2, -5)
    assert sampling.logit_bias == {17: -3.5}
    assert (request.stop_texts, request.stop_ids) == (("a", "b", "\nUser:"), {5})
    assert (request.adapter, request.num_answers, request.priority, request.max_tokens) == ("legal", 3, 4, 7)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_no_top_k_is_written_in_two_ways(top_k):
    assert asked(top_k=top_k).sampling.top_k is None


@pytest.mark.parametrize(
    ("more", "param", "message"),
    [
        ({"prompt": ()}, "prompt", "The prompt is empty"),
        (
            {"prompt": (1,) * 100},
            "prompt",
            "This model's maximum context length is 100 tokens, and the prompt is too long: it has 100,",
        ),
        ({"prompt": (999,)}, "prompt", "a token id outside the"),
        (
            {"max_tokens": 98},
            "max_tokens",
            "context length is 100 tokens, and the prompt is too long for that answer: it has 3 tokens, "
            "and 98 more are requested. Request at most 97, or shorten the prompt.",
        ),
        ({"max_tokens": 30, "limits": ServerLimits(max_output_tokens=20)}, "max_tokens", "at most 20 here"),
        ({"logit_bias": {"260": 1.0}}, "logit_bias", "not a token id below 260"),
        ({"logit_bias": {"\u0663": 1.0}}, "logit_bias", "not a token id below 260"),
        ({"stop": "x" * 257}, "stop", "1 to 256 characters"),
        ({"min_tokens": 2**40}, "min_tokens", "min_tokens must be"),
        ({"model": "other"}, "model", "there is m, legal"),
    ],
)
def test_a_mistake_names_its_key(more, param, message):
    with pytest.raises(ApiError, match=message) as refused:
        asked(**more)
    assert refused.value.param == param


def test_answers_are_no_longer_than_the_server_allows():
    assert asked(limits=ServerLimits(max_output_tokens=20)).max_tokens == 20


@pytest.mark.parametrize(
    ("most", "side", "kept"),
    [
        (None, None, range(200)),
        (5, None, range(195, 200)),
        (5, "left", range(195, 200)),
        (5, "right", range(5)),
        (300, "right", range(200)),
        (-1, "right", range(90)),
        (-1, None, range(110, 200)),
    ],
)
def test_a_prompt_is_truncated_at_the_side_that_is_named(most, side, kept):
    body = {"truncate_prompt_tokens": most, "truncation_side": side}
    served = replace(SERVED, context=100 if most in (5, -1) else 300)
    assert asked(prompt=tuple(range(200)), max_tokens=10, served=served, **body).prompt == tuple(kept)


def test_a_side_without_a_length_is_refused():
    with pytest.raises(ApiError, match="without truncate_prompt_tokens") as refused:
        asked(truncation_side="right")
    assert (refused.value.status, refused.value.param) == (400, "truncation_side")


def test_all_of_the_vocabulary_is_meant_by_minus_one():
    assert asked(prompt_logprobs=-1).num_prompt_logprobs == 260


@pytest.mark.parametrize(
    ("body", "num", "is_streamed", "is_refused"),
    [
        ({"n": 16}, 20, False, True),
        ({"n": 16}, 20, True, False),
        ({"n": 16}, None, False, False),
        ({"n": 1}, 20, False, False),
        ({"n": 1, "logprob_token_ids": [1] * 128}, 0, False, True),
        ({"n": 16, "prompt_logprobs": 20}, None, True, True),
        ({"n": 1, "prompt_logprobs": 1}, None, False, False),
        ({"n": 1, "prompt_logprobs": 20}, None, False, True),
        ({"n": 1, "prompt_logprobs": -1}, None, False, True),
    ],
)
def test_log_probabilities_that_would_fill_the_memory_are_refused(body, num, is_streamed, is_refused):
    served = replace(SERVED, context=40_000)
    asked_for = RouteOptions(max_tokens=20_000, num_logprobs=num)
    request = engine_request(
        Generation.model_validate(body),
        [1] * 20_000,
        asked_for,
        served=served,
        limits=ServerLimits(),
        client="alice",
        now_s=0.0,
    )
    if is_refused:
        with pytest.raises(ApiError, match=r"the limit is (4,194,304|262,144)"):
            check_logprobs([request] * 2, is_streamed=is_streamed)
    else:
        check_logprobs([request] * 2, is_streamed=is_streamed)
