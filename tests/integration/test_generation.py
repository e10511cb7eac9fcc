"""Greedy answers against `transformers.generate`, token for token, and an opened folder end to end."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from penstock.checkpoint.hf import load_pretrained
from penstock.core.errors import ModelError, UsageError
from penstock.engine.generate import generate
from penstock.engine.kv_cache import KVCache
from penstock.engine.llm import LLM
from penstock.engine.sampling import Sampling
from penstock.models import FAMILIES
from penstock.text.chat import ChatTemplate
from penstock.text.tokenizer import train_tokenizer

SMALL = {
    "vocab_size": 400,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "granite": GraniteConfig(**SMALL, residual_multiplier=0.5, logits_scaling=4.0, embedding_multiplier=3.0),
    "mistral": MistralConfig(**SMALL, sliding_window=7),
    "qwen2": Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=7, max_window_layers=2),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
}
PROMPTS = [[3], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], list(range(100, 145))]


def test_every_family_generates():
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request, tmp_path_factory):
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, load_pretrained(folder)


def continued(theirs, prompt, **options):
    ids = torch.tensor([prompt])
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, **options
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_greedy_answers_equal_those_of_transformers(pair, prompt):
    theirs, ours = pair
    expected = continued(theirs, prompt)
    assert len(set(expected)) > 5  # a loop on one token would prove little
    assert list(generate(ours, prompt, max_tokens=40)) == expected


def test_an_end_token_ends_the_answer_where_transformers_ends_it(pair):
    theirs, ours = pair
    prompt = PROMPTS[1]
    end = continued(theirs, prompt)[9]
    expected = continued(theirs, prompt, eos_token_id=end, pad_token_id=end)
    assert expected[-1] == end
    assert list(generate(ours, prompt, max_tokens=40, stop_ids={end})) == expected


@torch.inference_mode()
def test_logits_with_a_cache_filled_in_pieces_equal_those_without(pair):
    ours = pair[1]
    ids = torch.randint(0, 400, (2, 300))  # past the room first reserved
    cache = KVCache(ours.config.num_hidden_layers)
    pieces = [ours(part, cache=cache) for part in ids.split([5, 1, 250, 40, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), ours(ids), rtol=0, atol=2e-4)


def test_an_answer_can_be_repeated_from_any_token(pair):
    ours, sampling = pair[1], Sampling(temperature=1.0, top_p=1.0, seed=5)
    whole = list(generate(ours, PROMPTS[1], sampling=sampling, max_tokens=20))
    rest = list(generate(ours, PROMPTS[1] + whole[:8], sampling=sampling, max_tokens=12))
    assert whole[8:] == rest


def test_every_position_draws_anew(pair):
    ours = pair[1]

    def uniform(*_, finish, **__):
        return finish(torch.zeros(1, 1, 1), lambda hidden: torch.zeros(*hidden.shape[:-1], 400))

    flat = type(ours)(ours.config)
    flat.forward = uniform
    tokens = list(generate(flat, [1], sampling=Sampling(temperature=1.0, top_p=1.0), max_tokens=100))
    assert len(set(tokens)) > 75  # of 400 equally likely ones, 100 draws give 88 different on average


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a Hugging Face folder with a tokenizer, as `save_pretrained` and a Hub download leave it."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(CONFIGS["llama"]).save_pretrained(path)
    train_tokenizer(["the penstock feeds the turbine, größer"] * 9, vocab_size=300).save(
        path / "tokenizer.json"
    )
    return path


def answer(llm, prompt="the turbine", **options):
    pieces = list(llm.stream(llm.encode(prompt), sampling=Sampling(temperature=0), **options))
    return "".join(p.text for p in pieces), [t for p in pieces for t in p.token_ids], pieces[-1].finish


def test_streamed_text_is_the_text_of_the_tokens(folder):
    llm = LLM.open(folder, device="cpu")
    text, tokens, finish = answer(llm, max_tokens=60)
    assert text == llm.tokenizer.decode(tokens)
    assert len(tokens) == 60
    assert finish == "length"


def test_an_end_token_in_generation_config_ends_the_answer(folder, tmp_path):
    _, tokens, _ = answer(LLM.open(folder, device="cpu"), max_tokens=20)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [399, {tokens[7]}]}}')
    _, stopped, finish = answer(LLM.open(tmp_path, device="cpu"), max_tokens=20)
    assert (stopped, finish) == (tokens[: tokens.index(tokens[7])], "stop")


def test_a_stop_text_ends_the_answer_before_it(folder):
    llm = LLM.open(folder, device="cpu")
    text, _, _ = answer(llm, max_tokens=40)
    stop = text[10:13]
    stopped, _, finish = answer(llm, max_tokens=40, stop_texts=[stop])
    assert (stopped, finish) == (text[: text.index(stop)], "stop")


def test_the_context_is_filled_and_not_exceeded(folder):
    llm = LLM.open(folder, device="cpu")
    prompt = [3] * 500
    assert len(list(generate(llm.model, prompt))) == 12
    with pytest.raises(UsageError, match="max_tokens must be from 1 to 12"):
        generate(llm.model, prompt, max_tokens=13)
    with pytest.raises(UsageError, match=r"context of 512 tokens \(got 512\). Shorten it to at most 511"):
        generate(llm.model, [3] * 512)


def test_tokens_that_the_model_does_not_know_are_refused(folder):
    with pytest.raises(UsageError, match=r"it has 400\) \(got 400\)"):
        generate(LLM.open(folder, device="cpu").model, [1, 400])


def test_an_empty_prompt_starts_a_new_document(folder):
    llm = LLM.open(folder, device="cpu")
    assert llm.encode("") == [llm.tokenizer.eos_id]


def test_a_tokenizer_that_begins_texts_with_a_token_is_followed(folder, tmp_path):
    import tokenizers
    from tokenizers.processors import TemplateProcessing

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    llm = LLM.open(tmp_path, device="cpu")
    assert llm.encode("the turbine") == tokenizer.encode("the turbine").ids
    assert llm.encode("the turbine")[0] == begin


def test_the_tokens_of_a_template_are_tokens_and_those_of_a_prompt_are_text(folder):
    llm = LLM.open(folder, device="cpu")
    name = "<|endoftext|>"
    llm.template = ChatTemplate(source="{{ messages[0].content }}" + name)
    ids = llm.encode_chat([{"role": "user", "content": "the turbine"}])
    assert ids[-1] == llm.tokenizer.eos_id
    assert llm.tokenizer.eos_id not in llm.encode(name)


def test_a_folder_without_a_tokenizer_is_refused(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        LLM.open(tmp_path, device="cpu")
    with pytest.raises(UsageError, match="is not a folder"):
        LLM.open(tmp_path / "absent")
