"""Corpora and recipes that do not fit the loss are refused before anything is built."""

import dataclasses

import pytest

from penstock.core.errors import ConfigError
from penstock.data.corpus.open import open_corpus
from penstock.testing.corpora import write_corpus
from penstock.train.recipe.load import build_recipe
from penstock.train.tune.choose import check_answers, model_key
from tests.preferences import answers, pairs_corpus, thumbs_corpus


@pytest.fixture
def recipe(raw):
    """Return a recipe with a loss over the corpus of the fixture, which the checks do not open."""

    def made(loss, **data):
        raw["data"] |= {"packing": "whole", "overlong": "drop", **data}
        built = build_recipe(raw | {"tune": {"loss": "next_token" if loss == "next_token" else "simpo"}})
        return dataclasses.replace(
            built,
            run=dataclasses.replace(built.run, start_from="x"),
            tune=dataclasses.replace(built.tune, loss=loss),
        )

    return made


@pytest.fixture
def corpora(tmp_path):
    return {
        "pairs": open_corpus(pairs_corpus(tmp_path / "pairs", answers(9))),
        "thumbs": open_corpus(thumbs_corpus(tmp_path / "thumbs", answers(9))),
        "plain": open_corpus(write_corpus(tmp_path / "plain", [[1, 2, 3]] * 9)),
    }


@pytest.mark.parametrize(
    ("loss", "corpus", "said"),
    [
        ("dpo", "plain", r"'dpo' learns from pairs of answers, and corpus 'c' does not say .* --chat"),
        ("kto", "plain", r"'kto' learns from answers that are wanted or not, and corpus 'c'"),
        ("dpo", "thumbs", r"Corpus 'c' has single answers, and tune.loss 'dpo' .* to 'kto'"),
        ("kto", "pairs", r"Corpus 'c' has pairs, and tune.loss 'kto' .* to 'dpo', 'ipo' or 'simpo'"),
        ("next_token", "pairs", r"Corpus 'c' has rejected answers, and tune.loss 'next_token' would learn"),
        ("next_token", "thumbs", r"Corpus 'c' has rejected answers"),
    ],
)
def test_a_corpus_of_another_kind_is_refused_with_what_to_do(recipe, corpora, loss, corpus, said):
    with pytest.raises(ConfigError, match=said):
        check_answers(recipe(loss), {"c": corpora[corpus]})


@pytest.mark.parametrize(
    ("loss", "corpus"), [("dpo", "pairs"), ("simpo", "pairs"), ("kto", "thumbs"), ("next_token", "plain")]
)
def test_what_the_loss_learns_from_is_accepted(recipe, corpora, loss, corpus):
    check_answers(recipe(loss), {"c": corpora[corpus]})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"packing": "best_fit", "overlong": None}, r'needs whole documents.*data.overlong = "drop"'),
        (
            {"overlong": "truncate"},
            r"data.overlong 'truncate'",
        ),
    ],
)
def test_a_packing_that_parts_a_pair_is_refused(recipe, data, said):
    with pytest.raises(ConfigError, match=said):
        recipe("simpo", **data)


def test_a_loss_with_a_reference_needs_a_model_to_start_from(raw):
    raw["data"] |= {"packing": "whole", "overlong": "drop"}
    with pytest.raises(ConfigError, match=r"'dpo' compares with the model .* run.start_from"):
        build_recipe(raw | {"tune": {"loss": "dpo"}})


@pytest.mark.parametrize(
    ("key", "value"), [("beta", 0.0), ("temperature", -1.0), ("margin", -0.1), ("desirable_weight", 0.0)]
)
def test_keys_out_of_range_are_refused_by_name(raw, key, value):
    with pytest.raises(ConfigError, match=rf"tune\.{key} must be .*{value}"):
        build_recipe(raw | {"tune": {key: value}})


def test_references_are_of_the_weights_that_the_run_starts_with(recipe):
    """A base is rounded in the layers with an adapter only; weights of bfloat16 are rounded at the start."""

    def key(weights="float32", **tune):
        wanted = recipe("dpo")
        precision = dataclasses.replace(wanted.precision, weights=weights)
        tune = dataclasses.replace(wanted.tune, **tune)
        return model_key(dataclasses.replace(wanted, compute="float32", precision=precision, tune=tune))

    lora = {"method": "lora", "rank": 2}
    assert key() == key(**lora) == key(**lora, layers="mlp") == key("bfloat16_stochastic", **lora)
    int8 = {**lora, "base": "int8"}
    assert key(**int8) == key(**{**int8, "rank": 1}) != key(**int8, layers="mlp") != key(**lora)
    assert key() != key("bfloat16_master") == key("bfloat16_stochastic")
