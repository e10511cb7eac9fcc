"""Rows of new tokens are trained with an adapter, as peft + transformers train them, on every layout.

The reference is peft's `trainable_token_indices` over a resized model (tests/peft_loop.py); tolerances are
those of test_adapter_training.py. Of 64 rows 24 are new, so that a slice of four ranks has some of both. Here
most layouts have one model; check_new_rows_training.py has both of all.
"""

from dataclasses import replace

import pytest
import torch
from tests.peft_loop import folder_of
from tests.ranks.test_adapter_training import (
    METHODS,
    SMALL,
    Layouts,
    LiveWeights,
    check,
    compare,
    recipe_of,
    references_of,
    tuned,
    with_models,
)
from transformers import LlamaConfig, Qwen3Config

from penstock.checkpoint.find import find
from penstock.core.errors import CheckpointError, ConfigError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks

# of PEFT, which asks transformers in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

OLD, NAMED, ROWS = 40, 50, 64
LAYOUTS = [
    ("lora", 2, {}),
    ("dora", 3, {"base_sharding": "sharded"}),
    ("lora", 4, {"tensor": 4, "shard": 1}),
    ("dora", 4, {"tensor": 2, "base_sharding": "sharded"}),
    ("lora", 2, {"context": 2}),
    ("lora", 2, {"pipeline": 2, "rows": 2}),
    ("lora", 4, {"pipeline": 2, "tensor": 2, "rows": 2}),
    ("lora", 4, {"pipeline": 2, "rows": 1, "base_sharding": "sharded"}),
]


def corpus_of(folder, *, named):
    """A corpus whose manifest names its tokenizer, so that a vocabulary grows for it."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, named, (n % 40 + 1,), generator=generator).tolist() for n in range(300)]
    write_corpus(folder, documents, vocab_size=named)
    save_manifest(folder, replace(load_manifest(folder), tokenizer="ab" * 32))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return corpus_of(tmp_path_factory.mktemp("corpus"), named=NAMED)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where, sizes = tmp_path_factory.mktemp("models"), {**SMALL, "vocab_size": OLD}
    return {
        "llama": folder_of(where / "llama", LlamaConfig(**sizes)),
        "qwen3": folder_of(where / "qwen3", Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True)),
    }


@pytest.fixture(scope="module")
def references(corpus, folders, tmp_path_factory):
    """What one rank begins with, records and computes, and what peft does."""
    cases = [(method, family) for method in ("lora", "dora") for family in folders]
    return references_of(cases, corpus, folders, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_one_process_trains_new_rows_from_the_mean_as_peft_does(references, method, family):
    first, records, gradients, reference = references[method, family]
    new = {name: rows for name, rows in first.items() if name.endswith("new_rows")}
    assert new.keys() == ({"embed.new_rows", "unembed.new_rows"} if family == "llama" else {"embed.new_rows"})
    assert all(rows.shape == (ROWS - OLD, 32) and (rows == rows[0]).all() for rows in new.values())
    assert all(gradients[name].norm() > 0 for name in new)
    check(records, gradients, reference)


BOTH = [("lora", {"tensor": 4, "shard": 1}), ("lora", {"pipeline": 2, "rows": 2})]


CASES = with_models(LAYOUTS, BOTH)


@pytest.fixture(scope="module")
def layouts(corpus, folders, tmp_path_factory):
    return Layouts(CASES, corpus, folders, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_trains_new_rows_as_peft_does(layouts, references, case):
    compare(layouts, references, case)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_new_rows_move_to_other_ranks_with_the_adapter(corpus, folders, references, tmp_path, family):
    expected = [r["loss"] for r in references["lora", family][1] if "loss" in r]
    losses, run = [], tmp_path / "run"
    for ranks, stop, settings in ((2, 1, {"tensor": 2}), (1, 2, {}), (2, None, {"pipeline": 2, "rows": 2})):
        recipe = recipe_of(corpus, folders[family], run, METHODS["lora"], **settings)
        results = on_ranks(lambda world, r=recipe, s=stop: tuned(r, world, stop_at=s), ranks=ranks)
        losses += [r["loss"] for r in results[0][1] if "loss" in r]
    assert losses == pytest.approx(expected, rel=1e-5)
    saved = find(run).index()
    assert saved.meta.adapter.new_rows == ROWS - OLD
    assert saved.tensors["model.embed.new_rows"].shape == (ROWS - OLD, 32)


LIVE = [
    ("lora", "llama", 2, {"base_sharding": "sharded"}),
    ("lora", "llama", 4, {"pipeline": 2, "tensor": 2, "rows": 2}),
    ("lora", "qwen3", 2, {"tensor": 2}),
]


@pytest.fixture(scope="module")
def live_weights(corpus, folders, tmp_path_factory):
    return LiveWeights(LIVE, corpus, folders, tmp_path_factory.mktemp("live"))


@pytest.mark.parametrize("case", LIVE, ids=str)
def test_the_live_weights_have_the_new_rows_of_the_checkpoint(live_weights, case):
    found, merged = live_weights.of(case)
    rows = merged.embed.weight
    assert (rows[OLD:] - rows[:OLD].mean(0)).norm(dim=1).min() > 0
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-6, atol=1e-7)


def test_a_run_without_new_tokens_has_no_new_rows(folders, tmp_path):
    fitting = corpus_of(tmp_path / "corpus", named=OLD)
    assert recipe_of(fitting, folders["llama"], tmp_path / "run", METHODS["lora"]).adapter.new_rows == 0


def test_a_run_is_not_resumed_with_more_tokens(corpus, folders, tmp_path):
    recipe = recipe_of(corpus, folders["llama"], tmp_path / "run", METHODS["lora"], steps=1)
    on_ranks(lambda world: tuned(recipe, world)[1], ranks=1)
    more = corpus_of(tmp_path / "more", named=ROWS + 1)
    other = recipe_of(more, folders["llama"], tmp_path / "run", METHODS["lora"])
    with pytest.raises((AssertionError, CheckpointError), match="vocab_size was 64, is 128"):
        on_ranks(lambda world: tuned(other, world)[1], ranks=1)


def test_an_output_matrix_with_new_rows_takes_no_adapter(corpus, folders, tmp_path):
    tune = {"method": "lora", "rank": 4, "layers": ["all", "unembed"]}
    with pytest.raises(ConfigError, match="trains the 24 rows of new tokens: it cannot have both"):
        recipe_of(corpus, folders["llama"], tmp_path / "run", tune)
