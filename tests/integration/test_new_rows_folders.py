"""Adapters with rows of new tokens: through real peft and back, merged; the engine refuses to serve them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.integration.test_adapter_folders import METHODS, SMALL, close, exported, recipe_of, tuned
from tests.peft_loop import folder_of
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from penstock.checkpoint.adapter_run import open_with_adapter
from penstock.checkpoint.hf import load_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.checkpoint.peft import read_adapter
from penstock.core.errors import ModelError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.open import open_model
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks

# of PEFT, which asks transformers in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OLD, NAMED, ROWS = 48, 52, 64
IDS = torch.tensor([[50, 5, 9, 51, 3, 11, 7, 44, 40, 21, 51]])


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    return {
        "llama": folder_of(where / "llama", LlamaConfig(**SMALL)),
        "qwen3": folder_of(where / "qwen3", Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True)),
    }


@pytest.fixture(scope="module")
def runs(bases, tmp_path_factory):
    """A tuned run of each base: recipe, and logits of old and new tokens as trained."""
    corpus = tmp_path_factory.mktemp("corpus")
    documents = [[50, *(1 + (i * j) % 47 for j in range(1 + i % 40)), 51] for i in range(300)]
    write_corpus(corpus, documents, vocab_size=NAMED)
    save_manifest(corpus, replace(load_manifest(corpus), tokenizer="ab" * 32))
    found = {}
    for family, method in (("llama", "dora"), ("qwen3", "lora")):
        run = tmp_path_factory.mktemp(family) / "run"
        recipe = recipe_of(corpus, bases[family], run, METHODS[method])
        ((logits, _),) = on_ranks(lambda world, r=recipe: tuned(r, world, ids=IDS), ranks=1)
        found[family] = recipe, logits
    return found


@torch.no_grad()
def logits_of(model):
    out = model(IDS)
    return getattr(out, "logits", out)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_peft_computes_what_was_trained_over_a_resized_model(runs, bases, tmp_path, capsys, family):
    recipe, logits = runs[family]
    ours = exported(recipe, tmp_path / "ours")
    assert f"model.resize_token_embeddings({ROWS})" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32)
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


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_merged_model_has_the_new_rows(runs, tmp_path, family):
    recipe, logits = runs[family]
    merged = exported(recipe, tmp_path / "merged", "--merge", "--dtype", "fp32")
    theirs = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
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


def test_an_engine_refuses_new_rows_and_names_the_remedy(runs, bases, tmp_path):
    recipe, _ = runs["qwen3"]
    folder = exported(recipe, tmp_path / "adapter")
    options = EngineConfig(device="cpu", cache_gib=2**-8, adapters={"a": folder})
    with pytest.raises(
        ModelError,
        match=r"trainable_token_indices changes rows .*\[48, 49.*\.\.\.'\).*Merge it and serve the result: "
        r"penstock export .* --merge",
    ):
        build_engine(bases["qwen3"], options)


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
    with pytest.raises(ModelError, match=r"changes embed_tokens itself, and adapters change layers by thin"):
        read_adapter(folder, read_config(bases["qwen3"]))
