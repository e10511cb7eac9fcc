"""`/v1/completions` asked by the client of OpenAI, whole and streamed."""

import json
import threading

from openai.types import Completion

from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.engine.sampling_params import Params, Sampling
from tests.serving import PATIENCE_S, strict


def test_a_completion_is_of_the_published_type(client):
    reply = client.completions.create(
        model="tiny", prompt="the turbine", max_tokens=9, temperature=0, logprobs=3, n=2
    )
    strict(Completion, reply)
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].text == reply.choices[1].text  # both greedy
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (18, "length")
    logprobs = reply.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 9
    for chosen, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert chosen == max(top.values()) <= 0
        assert len(top) <= 3  # fewer where several are parts of characters


def test_prompts_are_answered_in_their_order_and_echoed(client):
    prompts = ["the penstock", "the turbine; ", "12 + 3"]
    replies = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=5, temperature=0, echo=True, n=2
    )
    assert [choice.index for choice in replies.choices] == list(range(6))
    assert [choice.text.startswith(prompts[i // 2]) for i, choice in enumerate(replies.choices)] == [True] * 6
    alone = client.completions.create(model="tiny", prompt=prompts[1], max_tokens=5, temperature=0, echo=True)
    assert alone.choices[0].text == replies.choices[2].text


def test_a_prompt_can_be_scored_without_an_answer(client):
    reply = client.completions.create(model="tiny", prompt="the turbine", max_tokens=0, echo=True, logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert reply.choices[0].text == "the turbine" == "".join(logprobs.tokens)
    assert logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_the_same_seed_gives_the_text_of_the_python_api(client, tiny_folder):
    settings = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "max_tokens": 24}
    with LLM(tiny_folder, EngineConfig(cache_gib=0.01, max_sequences=2)) as llm:
        sampling = Sampling(temperature=0.9, top_p=0.9, seed=7)
        expected = llm.generate("the penstock", Params(sampling=sampling, max_tokens=24))[0].text
    replies = [client.completions.create(model="tiny", prompt="the penstock", **settings) for _ in range(2)]
    assert [reply.choices[0].text for reply in replies] == [expected, expected]
    other = client.completions.create(model="tiny", prompt="the penstock", **{**settings, "seed": 8})
    assert other.choices[0].text != expected


def test_without_a_seed_answers_differ(client):
    texts = {
        client.completions.create(model="tiny", prompt="the", max_tokens=24).choices[0].text for _ in range(4)
    }
    assert len(texts) > 1


def test_events_are_lines_of_data_that_end_with_done(http):
    body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = list(reply.iter_lines())
    assert lines[1::2] == [""] * (len(lines) // 2)
    assert lines[-2] == "data: [DONE]"
    found = [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]
    assert [event["choices"][0]["finish_reason"] for event in found][-1] == "length"
    assert all("usage" not in event for event in found)


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(client):
    asked = {"model": "tiny", "prompt": "the penstock", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**asked).choices[0].text
    at = len(whole) // 2
    stop = whole[at : at + 2]
    cut = client.completions.create(**asked, stop=["never ever", stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_tokens_that_are_forbidden_do_not_come(client):
    asked = {"model": "tiny", "prompt": "the penstock", "max_tokens": 1, "temperature": 0}
    first = client.completions.create(**asked).choices[0].text
    tokens = client.post("/../tokenize", body={"prompt": first}, cast_to=object)["tokens"]
    biased = client.completions.create(**asked, logit_bias={str(tokens[0]): -100})
    assert biased.choices[0].text != first


def test_a_prompt_that_was_asked_before_is_found(client):
    prompt = "the penstock feeds the turbine; " * 6
    counts = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=2).usage.prompt_tokens_details
        for _ in range(2)
    ]
    assert counts[1].cached_tokens >= 16
    assert counts[1].cached_tokens >= counts[0].cached_tokens


def test_many_at_once_are_all_answered_as_if_alone(client):
    prompts = [f"the penstock {index}" for index in range(24)]
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts[:3]]
    found = {}

    def ask(prompt):
        found[prompt] = client.completions.create(prompt=prompt, **asked).choices[0].text

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [found[prompt] for prompt in prompts[:3]] == alone
    assert len(found) == len(prompts)
