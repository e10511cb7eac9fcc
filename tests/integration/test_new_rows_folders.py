"""Adapters with rows of new tokens: through real peft and back, merged, and served to single requests."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.forked_workers import forked_workers
from tests.integration.test_adapter_folders import METHODS, SMALL, close, exported, recipe_of, tuned
from tests.peft_loop import folder_of
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteConfig, LlamaConfig, Qwen3Config

from penstock.checkpoint.adapter_run import open_with_adapter
from penstock.checkpoint.hf import load_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.checkpoint.peft import read_new_rows
from penstock.checkpoint.speculator import save_speculator
from penstock.core.errors import ModelError, UsageError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.model_runner.new_tokens import ExtendedEmbedding
from penstock.engine.model_runner.open import open_model
from penstock.engine.request import Request
from penstock.engine.sampling_params import GREEDY
from penstock.models.speculator import Speculator, SpeculatorConfig
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks

__all__ = ["forked_workers"]

# of PEFT, which asks transformers in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OLD, NAMED, ROWS = 48, 52, 64
OPTIONS = {"gemma2": {"attn_implementation": "eager"}}
"""Of transformers, whose other attention has no softcap."""
IDS = torch.tensor([[50, 5, 9, 51, 3, 11, 7, 44, 40, 21, 51]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    caps = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}
    gemma2 = Gemma2Config(**SMALL, **caps, head_dim=16, attn_implementation="eager")
    return {
        "llama": folder_of(where / "llama", LlamaConfig(**SMALL)),
        "qwen3": folder_of(where / "qwen3", Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
        "granite": folder_of(
            where / "granite", GraniteConfig(**SMALL, logits_scaling=0.5, embedding_multiplier=3.0)
        ),
        "gemma2": folder_of(where / "gemma2", gemma2),
    }


@pytest.fixture(scope="module")
def runs(bases, tmp_path_factory):
    """A tuned run of each base: recipe, and logits of old and new tokens as trained."""
    corpus = tmp_path_factory.mktemp("corpus")
    documents = [[50, *(1 + (i * j) % 47 for j in range(1 + i % 40)), 51] for i in range(300)]
    write_corpus(corpus, documents, vocab_size=NAMED)
    save_manifest(corpus, replace(load_manifest(corpus), tokenizer="ab" * 32))
    found = {}
    for family, method in (("llama", "dora"), ("qwen3", "lora"), ("granite", "lora"), ("gemma2", "dora")):
        run = tmp_path_factory.mktemp(family) / "run"
        recipe = recipe_of(corpus, bases[family], run, METHODS[method])
        ((logits, _),) = on_ranks(lambda world, r=recipe: tuned(r, world, ids=IDS), ranks=1)
        found[family] = recipe, logits
    return found


@torch.no_grad()
def logits_of(model):
    out = model(IDS)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "gemma2"])
def test_peft_computes_what_was_trained_over_a_resized_model(runs, bases, tmp_path, capsys, family):
    recipe, logits = runs[family]
    ours = exported(recipe, tmp_path / "ours")
    assert f"model.resize_token_embeddings({ROWS})" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(
        bases[family], dtype=torch.float32, **OPTIONS.get(family, {})
    )
    model.resize_token_embeddings(ROWS)
    theirs = PeftModel.from_pretrained(model, ours).eval()
    close(logits_of(theirs), logits)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    before, after = (load_file(f / "adapter_model.safetensors") for f in (ours, tmp_path / "theirs"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    close(logits_of(theirs.merge_and_unload()), logits)
    read, _ = open_with_adapter(tmp_path / "theirs", base=bases[family])
    close(logits_of(read), logits)


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "gemma2"])
def test_the_merged_model_has_the_new_rows(runs, tmp_path, family):
    recipe, logits = runs[family]
    merged = exported(recipe, tmp_path / "merged", "--merge", "--dtype", "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, **OPTIONS.get(family, {}))
    assert theirs.get_input_embeddings().weight.shape[0] == ROWS
    close(logits_of(theirs), logits)
    model, _ = open_model(Path(recipe.run.dir))
    close(logits_of(model), logits)
    folder = exported(recipe, tmp_path / "adapter")
    read, _ = open_with_adapter(folder)
    close(logits_of(read), logits)
    rows = read.embed.weight
    assert (rows[OLD:] - rows[:OLD].mean(0)).norm(dim=1).min() > 0
    assert load_pretrained(merged).config.vocab_size == ROWS


NEW = tuple(range(OLD, ROWS))
PROMPT = tuple(IDS[0].tolist())
OLD_PROMPT = tuple(token % OLD for token in PROMPT)
TEN = {"max_tokens": 10, "num_prompt_logprobs": 0}


def with_other_rows(folder, to, *, num):
    """Write the adapter with `num` new tokens, of which each means what another one did."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "adapter_model.safetensors")
    for name in [name for name in tensors if "trainable_tokens_delta" in name]:
        tensors[name] = tensors[name].flip(0)[:num].clone()
    save_file(tensors, to / "adapter_model.safetensors")
    settings = json.loads((to / "adapter_config.json").read_text())
    indices = {name: ids[:num] for name, ids in settings["trainable_token_indices"].items()}
    settings["trainable_token_indices"] = indices
    (to / "adapter_config.json").write_text(json.dumps(settings))
    return to


def answers(engine, requests):
    """Return tokens and log-probabilities of the prompt of each request; all are asked at once."""
    found = {engine.add(request): [[], None] for request in requests}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            found[delta.request_id][0] += delta.token_ids
            if delta.prompt_logprobs is not None:
                found[delta.request_id][1] = [one.logprob for one in delta.prompt_logprobs[1:]]
    return [(tokens, torch.tensor(logprobs)) for tokens, logprobs in found.values()]


@torch.no_grad()
def expected(model, prompt, *, among=None):
    """Return what a model that has all tokens answers."""
    tokens = list(prompt)
    for _ in range(TEN["max_tokens"]):
        logits = model(torch.tensor([tokens]))[0, -1]
        tokens.append(int(logits.argmax()) if among is None else among[int(logits[list(among)].argmax())])
    logprobs = model(torch.tensor([prompt]))[0].log_softmax(-1)
    own = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    return tokens[len(prompt) :], own


@pytest.fixture(scope="module")
def known():
    """What `served` is of each family."""
    return {}


@pytest.fixture
def served(runs, bases, known, tmp_path_factory, family):
    """Two adapters that give one id to different tokens, and requests with what merged models answer."""
    if family not in known:
        known[family] = requests_of(runs[family][0], bases[family], tmp_path_factory.mktemp(family))
    return known[family]


def requests_of(recipe, base, where):
    folders = {"a": exported(recipe, where / "a")}
    folders["b"] = with_other_rows(folders["a"], where / "b", num=8)
    models = {name: open_with_adapter(folder)[0] for name, folder in folders.items()}
    models[None] = open_model(base)[0].eval()
    shorter = tuple(token for token in PROMPT if token < OLD + 8)
    cases = [
        ("a", PROMPT, None),
        ("a", PROMPT, NEW),
        (None, OLD_PROMPT, None),
        ("b", shorter, NEW[:8]),
        ("b", OLD_PROMPT, None),
        (None, OLD_PROMPT[:5], None),
    ]
    requests = [
        Request(prompt=prompt, adapter=name, sampling=replace(GREEDY, allowed_token_ids=among), **TEN)
        for name, prompt, among in cases
    ]
    answered = [expected(models[name], prompt, among=among) for name, prompt, among in cases]
    return folders, requests, answered


def check(found, answered):
    for (tokens, logprobs), (right, logprobs_right) in zip(found, answered, strict=True):
        assert tokens == right
        torch.testing.assert_close(logprobs, logprobs_right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "gemma2"])
@pytest.mark.parametrize(
    "options",
    [{}, {"tensor_parallel": 2}, {"drafts": "ngram"}, {"drafts": "heads"}, {"tokens_per_step": 17}],
    ids=lambda options: "-".join(map(str, options.items())) or "plain",
)
def test_each_request_has_the_new_tokens_of_its_adapter(served, bases, family, options, caplog, tmp_path):
    folders, requests, answered = served
    if options.get("drafts") == "heads":
        model = json.loads((bases[family] / "config.json").read_text())
        sizes = {"vocab_size": model["vocab_size"], "emb_dim": model["hidden_size"]}
        heads = Speculator(SpeculatorConfig(**sizes, inner_dim=16, n_predict=2))
        heads.initialise(seed=0)
        save_speculator(heads, tmp_path / "heads")
        options = {"drafts": str(tmp_path / "heads")}
    config = EngineConfig(device="cpu", cache_gib=2**-8, adapters=folders, **options)
    engine = build_engine(bases[family], config)
    try:
        check(answers(engine, requests), answered)
        check([answers(engine, [request])[0] for request in requests], answered)
        assert "Drafting failed" not in caplog.text
    finally:
        engine.close()


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite", "gemma2"])
@pytest.mark.parametrize("by", ["modules", "one-call"])
def test_new_tokens_come_and_go_with_their_adapters(served, bases, family, by):
    folders, requests, answered = served
    engine = build_engine(bases[family], EngineConfig(device="cpu", cache_gib=2**-8, prefix_caching=False))
    if by == "modules":
        engine.runner._is_settled = True
    base = [i for i, request in enumerate(requests) if request.adapter is None]
    plain = answers(engine, [requests[i] for i in base])
    for names in (["a"], ["a", "b"], ["b"], ["b", "a"]):
        for name in names:
            if name not in engine.runner.adapters:
                engine.add_adapter(name, folders[name])
        for name in set(engine.runner.adapters) - set(names):
            engine.remove_adapter(name)
        some = [i for i, request in enumerate(requests) if request.adapter in (None, *names)]
        found = answers(engine, [requests[i] for i in some])
        check(found, [answered[i] for i in some])
        assert [found[some.index(i)][0] for i in base] == [tokens for tokens, _ in plain]
    for name in ("a", "b"):
        engine.remove_adapter(name)
    again = answers(engine, [requests[i] for i in base])
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(again, plain, strict=True))
    assert not [m for m in engine.runner.model.modules() if isinstance(m, ExtendedEmbedding)]
    engine.close()


@pytest.mark.parametrize("family", ["qwen3"])
def test_a_request_may_only_name_tokens_that_its_adapter_has(served, bases, family):
    folders, _, _ = served
    engine = build_engine(bases[family], EngineConfig(device="cpu", cache_gib=2**-8, adapters=folders))
    assert [engine.vocab_size_of(name) for name in ("a", "b", None)] == [ROWS, OLD + 8, OLD]
    for name, most in (("a", ROWS), ("b", OLD + 8), (None, OLD)):
        engine.check(Request(prompt=(1,), max_tokens=1, adapter=name, sampling=only(most - 1)))
        with pytest.raises(UsageError, match=rf"outside the vocabulary \(got {most}\).* 0 to {most - 1}"):
            engine.check(Request(prompt=(1,), max_tokens=1, adapter=name, sampling=only(most)))
    engine.close()


def only(token):
    return replace(GREEDY, allowed_token_ids=(token,))


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        (5, r"are not those that follow the 48 of the base .*0 token ids"),
        ({"embed_tokens": [*range(16)]}, r"are not those that follow the 48 of the base .*16 token ids"),
        ([*range(47, 63)], r"are not those that follow the 48 of the base .*16 token ids"),
        (None, r"has rows of tokens for model\.embed_tokens, and this model needs them for none"),
    ],
)
def test_other_rows_than_those_of_new_tokens_are_not_merged(runs, tmp_path, indices, said):
    recipe, _ = runs["qwen3"]
    folder = exported(recipe, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["trainable_token_indices"] = indices
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said):
        open_with_adapter(folder)


def test_serving_refuses_rows_that_the_settings_do_not_name(runs, bases, tmp_path):
    recipe, _ = runs["qwen3"]
    folder = exported(recipe, tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    del config["trainable_token_indices"]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"has rows of tokens for .*embed_tokens, and this model needs them f"
    ):
        read_new_rows(folder, read_config(bases["qwen3"]))


@pytest.mark.parametrize("family", ["qwen3"])
def test_a_request_may_not_hold_tokens_of_another_adapter(served, bases, family):
    folders, _, _ = served
    engine = build_engine(bases[family], EngineConfig(device="cpu", cache_gib=2**-8, adapters=folders))
    of_another = {None: OLD, "b": OLD + 8, "a": ROWS}
    for name, token in of_another.items():
        for request in (
            Request(prompt=(1, token), max_tokens=1, adapter=name),
            Request(prompt=(1,), max_tokens=0, task="score", continuations=((2, token),), adapter=name),
        ):
            with pytest.raises(
                UsageError, match=rf"outside the model's vocabulary of {token} \(got {token}\)"
            ):
                engine.add(request)
    engine.close()


@pytest.mark.parametrize("family", ["qwen3"])
def test_an_adapter_for_which_memory_is_short_is_not_added(served, bases, family, monkeypatch):
    folders, requests, answered = served
    engine = build_engine(
        bases[family], EngineConfig(device="cpu", cache_gib=2**-8, adapters={"b": folders["b"]})
    )

    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    for place, what in ((torch, "cat"), (Adapters, "_update")):
        with monkeypatch.context() as patch:
            patch.setattr(place, what, fail)
            with pytest.raises(torch.OutOfMemoryError):
                engine.add_adapter("a", folders["a"])
        assert engine.runner.adapters.keys() == {"b"}
        assert engine.vocab_size_of("a") == OLD
    others = [i for i, request in enumerate(requests) if request.adapter != "a"]
    check(answers(engine, [requests[i] for i in others]), [answered[i] for i in others])
    engine.add_adapter("a", folders["a"])
    check(answers(engine, requests), answered)
    engine.close()
