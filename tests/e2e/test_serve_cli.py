"""`penstock serve` as a user types it: what it prints, lists and counts, and its smaller routes."""

import base64
import json
import re
import struct
from itertools import pairwise

import openai
import pytest
from openai.types import CreateEmbeddingResponse, Model

from tests.in_process import run_cli
from tests.serving import CONTEXT, strict


def test_the_start_line_says_what_was_computed(tiny_server):
    started, pid = tiny_server.started, tiny_server.process.pid
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", started["url"])
    assert (started["model"], started["context"], started["pid"]) == ("tiny", CONTEXT, pid)
    assert started["cache_blocks"] * started["block_size"] >= CONTEXT


def test_embeddings_are_unit_vectors_in_both_encodings(client, http):
    reply = client.embeddings.create(model="tiny", input=["the penstock", "größer"])
    strict(CreateEmbeddingResponse, reply)
    assert [entry.index for entry in reply.data] == [0, 1]
    for entry in reply.data:
        assert sum(value * value for value in entry.embedding) == pytest.approx(1, abs=1e-4)
    coded = http.post("/v1/embeddings", json={"input": "the penstock", "encoding_format": "base64"}).json()
    numbers = struct.unpack("<32f", base64.b64decode(coded["data"][0]["embedding"]))
    assert numbers == pytest.approx(reply.data[0].embedding, abs=1e-4)


def test_more_texts_than_are_computed_at_a_time_have_their_vectors_in_order(client):
    texts = ["the penstock", "größer", "the turbine"] * 50
    found = client.embeddings.create(model="tiny", input=texts)
    assert [entry.index for entry in found.data] == list(range(150))
    for entry, text in zip(found.data, texts, strict=True):
        assert entry.embedding == pytest.approx(found.data[texts.index(text)].embedding, abs=1e-4)
    one = client.embeddings.create(model="tiny", input=texts[:3])
    assert found.usage.prompt_tokens == 50 * one.usage.prompt_tokens


def test_a_text_that_fills_the_context_has_a_vector_and_one_more_token_is_400(client):
    full = client.embeddings.create(model="tiny", input=[1] * CONTEXT)
    assert full.usage.prompt_tokens == CONTEXT
    with pytest.raises(openai.BadRequestError, match=f"context length is {CONTEXT} tokens") as no:
        client.embeddings.create(model="tiny", input=[1] * (CONTEXT + 1))
    assert no.value.code == "context_length_exceeded"


def test_vectors_of_a_model_that_was_not_trained_for_it_are_not_cut(client):
    assert len(client.embeddings.create(model="tiny", input="a", dimensions=32).data[0].embedding) == 32
    with pytest.raises(openai.BadRequestError, match="was not trained for shortened embeddings"):
        client.embeddings.create(model="tiny", input="a", dimensions=8)
    with pytest.raises(openai.BadRequestError, match=r"have 32 dimensions \(got 64\)"):
        client.embeddings.create(model="tiny", input="a", dimensions=64)


def test_models_are_listed_and_others_unknown(client):
    [model] = client.models.list().data
    strict(Model, client.models.retrieve("tiny"))
    assert (model.id, model.max_model_len) == ("tiny", CONTEXT)
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt-9' here; there is tiny"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        client.completions.create(model="gpt-9", prompt="a")


def test_text_goes_to_tokens_and_back(http):
    for text in ("größer 日本", "", "a\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")):
        found = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
        assert found["count"] == len(found["tokens"])
        assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}


def test_a_client_that_leaves_frees_its_blocks(tiny_server, http):
    before = tiny_server.metric("penstock_answers_running")
    body = {"prompt": "the", "max_tokens": 4000, "n": 8, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        assert tiny_server.metric("penstock_answers_running") > before
    poll(lambda: tiny_server.metric("penstock_cache_blocks_used") == 0)
    with pytest.raises(openai.APITimeoutError), tiny_server.openai().with_options(timeout=0.5) as hasty:
        hasty.completions.create(
            model="tiny", prompt="the", max_tokens=4000, n=16, extra_body={"ignore_eos": True}
        )
    poll(lambda: tiny_server.metric("penstock_cache_blocks_used") == 0)


def poll(is_so):
    """Ask until it is so; each question is a request, so this waits without sleeping."""
    for _ in range(10_000):
        if is_so():
            return
    raise AssertionError("it never was")


def test_metrics_count_what_was_asked(tiny_server, client):
    before = tiny_server.metric("penstock_answer_tokens_total")
    first = tiny_server.metric("penstock_time_to_first_token_seconds_count")
    client.completions.create(model="tiny", prompt="the", max_tokens=7, n=2, extra_body={"ignore_eos": True})
    assert tiny_server.metric("penstock_answer_tokens_total") - before == 14
    assert tiny_server.metric("penstock_time_to_first_token_seconds_count") - first == 2
    assert tiny_server.metric("penstock_inter_token_seconds_count") > 0
    assert tiny_server.metric("penstock_cache_blocks") == tiny_server.started["cache_blocks"]


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/"])
def test_head_says_what_get_would_without_its_body(http, path):
    whole, head = http.get(path), http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


def test_a_slash_at_the_end_says_nothing(http):
    assert http.get("/v1/models/").json() == http.get("/v1/models").json()
    assert http.post("/v1/completions/", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_the_document_lists_every_route(http):
    paths = http.get("/openapi.json").json()["paths"]
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/models",
        "/tokenize",
        "/health",
    } <= set(paths)
    assert all("422" not in operation["responses"] for path in paths.values() for operation in path.values())


def test_inter_token_times_do_not_go_back(http):
    text = http.get("/metrics").text
    buckets = [float(n) for n in re.findall(r"inter_token_seconds_bucket\{le=\"[^\"]+\"\} ([\d.]+)", text)]
    assert all(a <= b for a, b in pairwise(buckets))


def test_a_dry_run_tells_what_the_engine_would_be(tiny_folder):
    dry = ("--dry-run", "--device", "cpu")
    done = run_cli("serve", tiny_folder, *dry, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["model"], told["device"], told["graphs"]) == (tiny_folder.name, "cpu", None)
    assert told["context"] == CONTEXT
    assert "graphs          none" in run_cli("serve", tiny_folder, *dry).stdout
    refused = run_cli("serve", "nowhere", *dry)
    assert (refused.returncode, "nowhere is not a folder" in refused.stderr) == (2, True)
