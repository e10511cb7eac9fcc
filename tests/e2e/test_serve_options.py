"""What agents and reinforcement learning ask of a server besides OpenAI's API, under vLLM's names."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.serving import HELLO, TEMPLATE, make_model, serving

CHAT = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8}
TEXT = {"model": "tiny", "prompt": "the penstock", "temperature": 0, "max_tokens": 8}
NO_END = {"ignore_eos": True}


@pytest.fixture(scope="module")
def reference(tiny_folder):
    """Return log-probabilities as transformers computes them, [tokens, vocabulary]: of what follows each."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()

    def logprobs(tokens):
        with torch.inference_mode():
            return model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    return logprobs


def tokens_of(http, **asked):
    return http.post("/tokenize", json=asked).json()["tokens"]


def test_the_ids_of_prompt_and_answer_are_returned(client, http):
    asked = {**CHAT, "n": 2, "temperature": 1, "seed": 3, "extra_body": {"return_token_ids": True, **NO_END}}
    whole = client.chat.completions.create(**asked)
    assert whole.prompt_token_ids == tokens_of(http, messages=HELLO)
    for choice in whole.choices:
        text = http.post("/detokenize", json={"tokens": choice.token_ids}).json()["prompt"]
        assert (len(choice.token_ids), text) == (8, choice.message.content)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [getattr(chunk, "prompt_token_ids", None) for chunk in chunks].count(whole.prompt_token_ids) == 1
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    for choice in whole.choices:
        mine = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        assert [token for one in mine for token in getattr(one, "token_ids", ())] == choice.token_ids
    assert "token_ids" not in client.chat.completions.create(**CHAT).choices[0].model_dump()


def test_completions_return_ids_of_each_prompt(client, http):
    prompts = ["the penstock", "a turbine of"]
    asked = {**TEXT, "prompt": prompts, "extra_body": {"return_token_ids": True, **NO_END}}
    whole = client.completions.create(**asked).choices
    assert [choice.prompt_token_ids for choice in whole] == [tokens_of(http, prompt=text) for text in prompts]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    for index, choice in enumerate(whole):
        mine = [piece for piece in pieces if piece.index == index]
        assert [token for piece in mine for token in piece.token_ids] == choice.token_ids
        assert [getattr(piece, "prompt_token_ids", None) for piece in mine[:2]] == [
            choice.prompt_token_ids,
            None,
        ]


@pytest.mark.parametrize("num", [0, 3, -1])
def test_the_prompts_log_probabilities_are_those_of_transformers(client, http, reference, num):
    more = {"prompt_logprobs": num, **NO_END}
    for told, tokens in (
        (
            client.completions.create(**TEXT, extra_body=more).choices[0].prompt_logprobs,
            tokens_of(http, prompt=TEXT["prompt"]),
        ),
        (
            client.chat.completions.create(**CHAT, extra_body=more).prompt_logprobs,
            tokens_of(http, messages=HELLO),
        ),
    ):
        expected = reference(tokens)
        assert told[0] is None
        assert len(told) == len(tokens)
        for at, entry in enumerate(told[1:], 1):
            own = entry[str(tokens[at])]
            row = expected[at - 1]
            assert own["logprob"] == pytest.approx(row[tokens[at]].item(), abs=1e-4)
            assert own["rank"] == int((row > row[tokens[at]]).sum()) + 1
            assert (
                own["decoded_token"]
                == http.post("/detokenize", json={"tokens": [tokens[at]]}).json()["prompt"]
            )
            likely = {str(token) for token in row.topk(num if num >= 0 else len(row)).indices.tolist()}
            assert set(entry) == likely | {str(tokens[at])}
            for token in likely:
                assert entry[token]["logprob"] == pytest.approx(row[int(token)].item(), abs=1e-4)


def test_log_probabilities_of_named_tokens_are_those_of_transformers(client, reference):
    more = {
        "logprob_token_ids": [5, 300, 17],
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        **NO_END,
    }
    reply = client.chat.completions.create(**CHAT, logprobs=True, extra_body=more)
    plain = client.completions.create(**TEXT, logprobs=2, extra_body=more).choices[0]
    choice = reply.choices[0]
    for prompt, drawn, rows in (
        (
            reply.prompt_token_ids,
            choice.token_ids,
            [{one.token: one.logprob for one in entry.top_logprobs} for entry in choice.logprobs.content],
        ),
        (plain.prompt_token_ids, plain.token_ids, plain.logprobs.top_logprobs),
    ):
        expected = reference([*prompt, *drawn])[len(prompt) - 1 :]
        for row, likely in zip(rows, expected, strict=False):
            assert set(row) >= {"token_id:5", "token_id:300", "token_id:17"}
            for name, value in row.items():
                assert value == pytest.approx(likely[int(name.removeprefix("token_id:"))].item(), abs=1e-4)
    assert [entry.token for entry in choice.logprobs.content] == [
        f"token_id:{token}" for token in choice.token_ids
    ]
    assert plain.logprobs.tokens == [f"token_id:{token}" for token in plain.token_ids]


def test_only_allowed_tokens_come(client):
    more = {"allowed_token_ids": [70, 71, 72], "return_token_ids": True}
    reply = client.completions.create(**{**TEXT, "temperature": 1, "n": 8}, extra_body=more)
    assert {token for choice in reply.choices for token in choice.token_ids} == {70, 71, 72}


@pytest.mark.parametrize("length", [1, 2])
def test_bad_words_do_not_come(client, http, length):
    asked, more = {**TEXT, "max_tokens": 60}, {"return_token_ids": True, **NO_END}
    drawn = client.completions.create(**asked, extra_body=more).choices[0].token_ids
    parts = [drawn[at : at + length] for at in range(len(drawn) - length + 1)]
    words = {http.post("/detokenize", json={"tokens": part}).json()["prompt"]: part for part in parts}
    spelled = {word: part for word, part in words.items() if tokens_of(http, prompt=word) == part}
    assert len(spelled) >= 3  # others are parts of characters, or would be written by other tokens
    for word, part in list(spelled.items())[:3]:
        again = (
            client.completions.create(**asked, extra_body={**more, "bad_words": [word]}).choices[0].token_ids
        )
        assert again != drawn
        assert all(again[at : at + length] != part for at in range(len(again)))


def test_a_prompt_is_cut_to_its_last_tokens(client, http):
    long = "the turbine feeds the penstock " * 40
    ids = tokens_of(http, prompt=long)
    more = {"truncate_prompt_tokens": 7, "return_token_ids": True}
    assert (
        client.completions.create(**{**TEXT, "prompt": long}, extra_body=more).choices[0].prompt_token_ids
        == ids[-7:]
    )
    chat = client.chat.completions.create(**CHAT, extra_body=more)
    assert chat.prompt_token_ids == tokens_of(http, messages=HELLO)[-7:]
    too_many = [*range(1, 300)] * 20
    fits = client.completions.create(
        **{**TEXT, "prompt": too_many}, extra_body={**more, "truncate_prompt_tokens": -1}
    )
    assert fits.choices[0].prompt_token_ids == too_many[-(4096 - 8) :]


@pytest.mark.parametrize(("side", "kept"), [("left", slice(-7, None)), ("right", slice(7))])
def test_the_side_of_the_truncation_is_chosen(client, http, side, kept):
    long = "the turbine feeds the penstock " * 2000  # more than any context holds
    ids = tokens_of(http, prompt="the turbine feeds the penstock " * 40)
    more = {"truncate_prompt_tokens": 7, "truncation_side": side, "return_token_ids": True}
    found = client.completions.create(**{**TEXT, "prompt": long}, extra_body=more).choices[0]
    assert found.prompt_token_ids == ids[kept]
    chat = client.chat.completions.create(**CHAT, extra_body=more)
    assert chat.prompt_token_ids == tokens_of(http, messages=HELLO)[kept]
    said = {**CHAT, "messages": [{"role": "user", "content": long * 10}]}
    assert len(client.chat.completions.create(**said, extra_body=more).prompt_token_ids) == 7


def test_texts_for_vectors_are_truncated_at_their_end_unless_the_side_is_named(http):
    text = "a turbine of the penstock"
    ids = tokens_of(http, prompt=text)

    def vector(given, **more):
        body = {"input": given, "encoding_format": "float", **more}
        reply = http.post("/v1/embeddings", json=body).json()
        return reply["data"][0]["embedding"], reply["usage"]["prompt_tokens"]

    for more, kept in (({}, ids[:4]), ({"truncation_side": "left"}, ids[-4:])):
        found, num = vector(text, truncate_prompt_tokens=4, **more)
        assert (found, num) == (pytest.approx(vector(kept)[0], abs=1e-5), 4)
    assert vector("the penstock " * 20_000, truncate_prompt_tokens=-1)[1] == 4096
    refused = http.post("/v1/embeddings", json={"input": "penstock " * 400_000, "truncate_prompt_tokens": 9})
    assert refused.status_code == 400
    assert "bytes; 131,072 tokens hold at most" in refused.text
    cut = {"truncate_prompt_tokens": 3, "truncation_side": "left"}
    same = text.replace("a turbine", "some water")
    pairs = http.post("/v1/score", json={"text_1": text, "text_2": [same], **cut}).json()
    assert (pairs["usage"]["prompt_tokens"], pairs["data"][0]["score"]) == (6, pytest.approx(1.0))
    ranked = http.post("/v1/rerank", json={"query": text, "documents": ["b", same], **cut}).json()
    assert ranked["results"][0]["index"] == 1


def test_the_assistants_last_words_come_before_the_answer(client):
    begun = [*HELLO, {"role": "assistant", "content": "Sure. "}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False, **NO_END}
    asked = {**CHAT, "messages": begun}
    plain = client.chat.completions.create(**asked, extra_body=goes_on).choices[0].message.content
    echoed = client.chat.completions.create(**asked, extra_body={**goes_on, "echo": True})
    assert echoed.choices[0].message.content == f"Sure. {plain}"
    chunks = client.chat.completions.create(**asked, extra_body={**goes_on, "echo": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == f"Sure. {plain}"
    of_user = client.chat.completions.create(**CHAT, extra_body={"echo": True, **NO_END}).choices[0].message
    assert (
        of_user.content
        == client.chat.completions.create(**CHAT, extra_body=NO_END).choices[0].message.content
    )


def test_tokens_are_told_as_the_vocabulary_spells_them(http, tiny_folder):
    vocabulary = json.loads((tiny_folder / "tokenizer.json").read_text())["model"]["vocab"]
    found = http.post("/tokenize", json={"prompt": "the penstock", "return_token_strs": True}).json()
    assert [vocabulary[text] for text in found["token_strs"]] == found["tokens"]
    assert http.post("/tokenize", json={"prompt": "a"}).json()["token_strs"] is None


def test_the_first_chunks_count_too_where_that_is_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.chat.completions.create(**CHAT, n=2, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks[:2]] == [0, 0]
    assert len({chunk.usage.prompt_tokens for chunk in chunks}) == 1
    plain = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    assert [chunk.usage for chunk in plain[:-1]] == [None] * (len(plain) - 1)


GRANITE = """\
{%- for document in documents or [] %}{{ '<|document ' ~ document.doc_id ~ '|>' + document.text }}{% endfor %}
{%- for note in notes or [] %}{{ note }}{% endfor %}"""


def test_lists_and_objects_reach_the_template_as_text(tmp_path):
    folder = make_model(tmp_path / "tiny", template=GRANITE + TEMPLATE)
    with (
        serving(folder, "--cache-gib", "0.01") as running,
        running.http() as http,
        running.openai() as client,
    ):
        documents = [{"doc_id": 1, "text": "a <|endoftext|> b"}, {"doc_id": 2, "text": "c"}]
        asked = {
            "messages": HELLO[1:],
            "chat_template_kwargs": {"documents": documents, "notes": ["x", {"y": 1}]},
        }
        ids = tokens_of(http, **asked)
        text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text.startswith("<|document 1|>a <|endoftext|> b<|document 2|>cx{'y': 1}<|user|>")
        assert 0 not in ids  # the id of <|endoftext|>
        for more in (asked, {"documents": documents, "chat_template_kwargs": {"notes": ["x", {"y": 1}]}}):
            more = {key: value for key, value in more.items() if key != "messages"} | {
                "return_token_ids": True
            }
            reply = client.chat.completions.create(**{**CHAT, "messages": HELLO[1:]}, extra_body=more)
            assert reply.prompt_token_ids == ids


def test_an_effort_without_a_place_in_the_template_is_without_effect(tmp_path):
    template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}{% for x in extra %}{% endfor %}"
    folder = make_model(tmp_path / "tiny", template=template)
    with serving(folder, "--cache-gib", "0.01") as server, server.http() as http, server.openai() as client:
        plain = client.chat.completions.create(**CHAT).usage.prompt_tokens
        assert client.chat.completions.create(**CHAT, reasoning_effort="high").usage.prompt_tokens == plain
        wrong = {"messages": HELLO, "chat_template_kwargs": {"extra": 7, "other": "x"}}
        for route in ("/v1/chat/completions", "/tokenize"):
            refused = http.post(route, json=wrong)
            assert refused.status_code == 400
            assert "variables extra (int): 'int' object is not iterable" in refused.json()["error"]["message"]
        own = [{"role": "narrator", "content": "a river"}]
        asked = {**CHAT, "messages": own, "extra_body": {"return_token_ids": True}}
        tokens = client.chat.completions.create(**asked).prompt_token_ids
        assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "narratora river"


def test_pairs_of_texts_are_scored_and_ordered_by_their_vectors(client, http):
    texts = ["the penstock", "a turbine", "water flows", "the penstock"]
    vectors = torch.tensor(
        [
            one.embedding
            for one in client.embeddings.create(model="tiny", input=texts, encoding_format="float").data
        ]
    )
    expected = (vectors[1:] @ vectors[0]).tolist()
    for route in ("/v1/score", "/score"):
        found = http.post(route, json={"text_1": texts[0], "text_2": texts[1:]}).json()
        assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
        assert [one["index"] for one in found["data"]] == [0, 1, 2]
    pairs = http.post("/v1/score", json={"text_1": texts[1:], "text_2": texts[1:]}).json()
    assert [one["score"] for one in pairs["data"]] == pytest.approx([1.0] * 3)
    for route in ("/v1/rerank", "/rerank", "/v2/rerank"):
        ranked = http.post(route, json={"query": texts[0], "documents": texts[1:], "top_n": 2}).json()
        assert ranked["results"][0] == {
            "index": 2,
            "document": {"text": texts[3]},
            "relevance_score": pytest.approx(1.0),
        }
        assert len(ranked["results"]) == 2
    assert ranked["usage"]["total_tokens"] == sum(len(tokens_of(http, prompt=text)) for text in texts)
    all_of_them = http.post(
        "/v1/rerank", json={"query": texts[0], "documents": texts[1:], "return_documents": False}
    )
    scores = [one["relevance_score"] for one in all_of_them.json()["results"]]
    assert scores == sorted(scores, reverse=True)
    assert scores == pytest.approx(sorted(expected, reverse=True), abs=1e-5)
    assert "document" not in all_of_them.json()["results"][0]
