"""The data of a recipe: held-out rows of every corpus, and where a capped one ends, told before the run."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import ConfigError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.data.types import IGNORED_LABEL
from penstock.testing.corpora import write_corpus
from penstock.train.data_setup import (
    check_supply,
    check_tokenizers,
    heldout_rows,
    shares_of,
    shortage,
    train_loader,
)
from penstock.train.inspect.open_run import open_run
from penstock.train.resolve.load import build_recipe
from penstock.train.resolve.summary import derive
from penstock.train.setup import write_identity
from tests.growing import streamed_corpus


@pytest.fixture
def raw(tmp_path):
    lengths = {"web": 4000, "code": 1500, "wiki": 400}
    corpora = {
        name: {
            "path": str(write_corpus(tmp_path / name, [[token] * 6] * count, vocab_size=50)),
            "weight": weight,
        }
        for token, (name, count), weight in zip((1, 2, 3), lengths.items(), (6, 3, 1), strict=True)
    }
    return {
        "run": {"dir": str(tmp_path / "run"), "steps": 40},
        "model": {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
        "data": {
            "corpora": corpora,
            "sequence_length": 16,
            "global_batch_size": 10,
            "holdout": 0.1,
            "num_workers": 0,
        },
        "validate": {"every": 10, "samples": 50},
    }


def rows_by_corpus(heldout):
    batch = heldout.loader.gather(np.arange(heldout.rows))
    tokens = batch["input_ids"].numpy()
    assert (batch["labels"].numpy() != IGNORED_LABEL).any()
    return np.bincount(tokens[:, 0], minlength=4)[1:].tolist()


def test_validation_takes_of_each_corpus_its_share_or_all_it_has(raw):
    raw["data"]["corpora"]["wiki"]["weight"] = 5
    heldout = heldout_rows(build_recipe(raw), deliver="torch")
    wiki = heldout.loader.samples_per_epoch["wiki"]
    assert wiki < 18, "fewer rows than its share"
    assert rows_by_corpus(heldout) == [21, 11, wiki], "the others have theirs nevertheless"
    assert heldout.rows == 21 + 11 + wiki


@pytest.mark.parametrize("samples", [1, 3, 64, 101])
def test_each_corpus_with_a_weight_has_a_say(raw, samples):
    raw["validate"]["samples"] = samples
    heldout = heldout_rows(build_recipe(raw))
    assert min(rows_by_corpus(heldout)) >= 1


def test_what_has_no_weight_is_not_validated_on(raw):
    raw["data"]["corpora"]["wiki"]["weight"] = 0
    heldout = heldout_rows(build_recipe(raw))
    assert rows_by_corpus(heldout)[2] == 0


@pytest.mark.parametrize("others", [True, False])
def test_a_first_part_without_a_held_out_document_is_refused_with_its_size(raw, tmp_path, others):
    corpora = raw["data"]["corpora"] if others else {}
    path = streamed_corpus(tmp_path / "text", [6] * 20)
    raw["data"]["corpora"] = {**corpora, "text": {"path": str(path), "weight": 1}}
    message = (
        r"no document of the first part of corpus 'text' to validate on: it has 120 tokens\. Set validate"
    )
    with pytest.raises(ConfigError, match=message):
        heldout_rows(build_recipe(raw))
    raw["validate"]["every"] = 0
    assert heldout_rows(build_recipe(raw)) is None


def test_rows_are_shared_out_by_weight():
    assert shares_of(10, {"a": 0.5, "b": 0.5, "c": 0.0}, {"a": 3, "b": 99, "c": 9}) == {
        "a": 3,
        "b": 5,
        "c": 0,
    }


def test_a_ramp_that_uses_up_a_capped_corpus_is_told_with_the_step_before_the_run(raw):
    """wiki has some 135 rows; 1 a step for 20 steps, then ever more."""
    raw["data"]["corpora"]["wiki"]["epochs"] = 1
    recipe = build_recipe(raw)
    assert shortage(recipe, train_loader(recipe, rank=0, world_size=1)) is None
    raw["data"]["schedule"] = [
        {"at_step": 20, "weights": {"web": 0, "code": 0, "wiki": 1}, "ramp_steps": 10},
    ]
    recipe = build_recipe(raw)
    loader = train_loader(recipe, rank=0, world_size=1)
    short = shortage(recipe, loader)
    assert (short.corpus, short.epochs) == ("wiki", 1)
    assert 30 < short.step < 40
    loader.batch_at(short.step - 1)
    with pytest.raises(Exception, match="has given all"):
        loader.batch_at(short.step)
    with pytest.raises(
        ConfigError, match=rf"corpus 'wiki' reaches the end of its one epoch at step {short.step}\."
    ):
        check_supply(recipe, loader)
    with pytest.raises(ConfigError, match="reaches the end of its one epoch"):
        derive(recipe, world_size=1)


def test_every_batch_size_of_the_plan_must_divide_over_the_ranks_and_micro_batches(raw):
    raw["data"]["schedule"] = [{"at_step": 20, "global_batch_size": 15}]
    with pytest.raises(ConfigError, match="15"):
        derive(build_recipe(raw), world_size=2)
    raw["data"] |= {"micro_batch_size": 2}
    with pytest.raises(ConfigError, match=r"micro_batch_size 2 does not divide a rank's 15 rows"):
        derive(build_recipe(raw), world_size=1)
    raw["data"]["schedule"][0]["micro_batch_size"] = 5
    derive(build_recipe(raw), world_size=1)


def test_a_planned_length_beyond_the_model_is_refused_and_the_context_follows_from_the_longest(raw):
    raw["data"]["schedule"] = [{"at_step": 20, "sequence_length": 64}]
    assert build_recipe(raw).model.max_position_embeddings == 64
    raw["model"]["max_position_embeddings"] = 32
    with pytest.raises(ConfigError, match=r"data\.sequence_length 64 in data\.schedule is above .* 32"):
        build_recipe(raw)


def test_the_work_of_a_run_counts_each_token_at_its_length(raw):
    raw["data"]["schedule"] = [
        {"at_step": 30, "sequence_length": 64, "global_batch_size": 2},
        {"at_step": 90, "sequence_length": 32},
    ]
    recipe = build_recipe(raw)
    derived = derive(recipe, world_size=1)
    flops = recipe.model.flops_per_token
    assert derived.numbers["tokens in the run"] == 30 * 160 + 10 * 128
    assert derived.numbers["FLOP in the run"] == 30 * 160 * flops(16) + 10 * 128 * flops(64)
    assert derived.changes[1].startswith("after step 90 and 12,480 tokens (12.5k) (beyond run.steps)")


def test_a_folder_without_a_recipe_is_no_run(tmp_path):
    with pytest.raises(ConfigError.__bases__[0], match=r"holds no config\.json\. Give the folder of a run"):
        open_run(tmp_path)


def made_with(folder, tokenizer):
    """Say in a corpus's manifest which tokenizer it was made with."""
    save_manifest(folder, replace(load_manifest(folder), tokenizer=tokenizer))


def test_corpora_of_two_tokenizers_are_refused_and_who_has_which_is_told(raw):
    made_with(Path(raw["data"]["corpora"]["code"]["path"]), "aa" * 32)
    for name in ("web", "wiki"):
        made_with(Path(raw["data"]["corpora"][name]["path"]), "bb" * 32)
    with pytest.raises(ConfigError, match=r"different tokenizers .*code: aaaaaaaaaaaaaaaa; web, wiki: bbbb"):
        check_tokenizers(train_loader(build_recipe(raw), rank=0, world_size=1))


def test_a_corpus_that_does_not_say_its_tokenizer_mixes_with_one_that_does(raw):
    code = Path(raw["data"]["corpora"]["code"]["path"])
    made_with(code, "aa" * 32)
    (code / "tokenizer.json").write_text("{}")
    config = build_recipe(raw)
    loader = train_loader(config, rank=0, world_size=1)
    check_tokenizers(loader)
    Path(config.run.dir).mkdir()
    write_identity(config, loader)
    assert (Path(config.run.dir) / "tokenizer.json").read_text() == "{}"


def test_every_micro_batch_of_a_recipe_holds_each_corpus_in_its_share(raw):
    raw["data"] |= {"micro_batch_size": 5, "schedule": [{"at_step": 3, "micro_batch_size": 2}]}
    loader = train_loader(build_recipe(raw), rank=0, world_size=1)
    for step in range(6):
        rows = 5 if step < 3 else 2
        whose = loader.corpora_of(loader.batch_at(step)["sample_ids"].numpy())
        share = np.bincount(whose, minlength=3) * rows / 10
        for first in range(0, 10, rows):
            held = np.bincount(whose[first : first + rows], minlength=3)
            assert (held >= np.floor(share)).all()
            assert (held <= np.ceil(share)).all()
