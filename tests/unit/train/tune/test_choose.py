"""Corpora and recipes that do not fit the loss are refused before anything is built."""

import dataclasses

import pytest

from penstock.core.errors import ConfigError
from penstock.data.corpus.open import open_corpus
from penstock.testing.corpora import write_corpus
from penstock.train.resolve.load import build_recipe
from penstock.train.tune.check_corpora import check_corpora
from penstock.train.tune.choose import model_key
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
        check_corpora(recipe(loss), {"c": corpora[corpus]})


@pytest.mark.parametrize(
    ("loss", "corpus"), [("dpo", "pairs"), ("simpo", "pairs"), ("kto", "thumbs"), ("next_token", "plain")]
)
def test_what_the_loss_learns_from_is_accepted(recipe, corpora, loss, corpus):
    check_corpora(recipe(loss), {"c": corpora[corpus]})


def test_a_corpus_without_a_learned_token_is_refused_with_what_to_do(recipe, tmp_path):
    folder = write_corpus(tmp_path / "none", [[1, 2, 3]] * 9, columns={"learned": [[0, 0, 0]] * 9})
    with pytest.raises(
        ConfigError, match=r"'c' has no token that is learned, of 27 \(got '.*none'\)\. Prepare"
    ):
        check_corpora(recipe("next_token"), {"c": open_corpus(folder)})


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
    ("key", "value", "fix"),
    [
        ("beta", 0.0, "Leave it out for 0.1"),
        ("temperature", -1.0, "Leave it out for 1.0"),
        ("margin", -0.1, "Leave it out for 0.5"),
        ("desirable_weight", 0.0, "Leave it out for 1.0"),
        ("rank", 0, "8 to 64 are usual.* tune.method to 'full'"),
        ("alpha", 0.0, "Twice tune.rank"),
    ],
)
def test_keys_out_of_range_are_refused_by_name_with_what_to_do(raw, key, value, fix):
    with pytest.raises(ConfigError, match=rf"tune\.{key} must be .*\(got {value}\)\. {fix}"):
        build_recipe(raw | {"tune": {key: value}})


@pytest.mark.parametrize(
    ("tune", "said"),
    [
        ({"rank": 513}, r"any that is read again, .* \(got 513\)\. Use at most 512"),
        ({"rank": 500}, r"larger than the layer '\w+', which is \d+ x \d+ \(got 500\)\. Use at most \d+"),
        (
            {"layers": ("query", "logits")},
            r"layer that the model does not have \(got 'logits'\)\. Known: .*'?unembed",
        ),
        ({"layers": ("embed",)}, r"layer that the model does not have \(got 'embed'\)"),
    ],
)
def test_an_adapter_that_the_layers_do_not_have_room_for_is_refused(recipe, tune, said):
    wanted = recipe("next_token")
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(wanted.tune, method="lora", **tune).check_fit(wanted.model)


def test_the_output_matrix_is_adapted_where_it_is_one(recipe):
    wanted = recipe("next_token")
    tune = dataclasses.replace(wanted.tune, method="lora", rank=8, layers=("mlp", "unembed"))
    untied = dataclasses.replace(wanted.model, tie_word_embeddings=False)
    tune.check_fit(untied)
    assert tune.adapter.unembed and tune.adapter.layers == ("gate", "up", "down")  # noqa: PT018
    with pytest.raises(ConfigError, match="no output matrix of its own: it is the embedding"):
        tune.check_fit(dataclasses.replace(untied, tie_word_embeddings=True))
    with pytest.raises(ConfigError, match=r"names 'unembed' alone.* \[\"all\", \"unembed\"\]"):
        dataclasses.replace(tune, layers="unembed").check_fit(untied)
    with pytest.raises(ConfigError, match=r"larger than the layer .unembed., which is 5 x "):
        dataclasses.replace(tune, rank=6).check_fit(dataclasses.replace(untied, vocab_size=5))


def test_four_bits_are_refused_where_tensor_parallelism_cuts_a_group(recipe):
    wanted = recipe("next_token")
    model = dataclasses.replace(wanted.model, hidden_size=64, num_attention_heads=4, intermediate_size=128)
    int4 = dataclasses.replace(wanted.tune, method="lora", rank=2, base="int4")
    int4.check_slices(model, ranks=2)
    with pytest.raises(ConfigError, match=r"cuts the 64 inputs of layer 'output' into 16 a rank \(got 4\)"):
        int4.check_slices(model, ranks=4)
    dataclasses.replace(int4, base="int8").check_slices(model, ranks=4)
    odd = dataclasses.replace(model, intermediate_size=120)  # its last group is short
    int4.check_slices(odd, ranks=1)
    with pytest.raises(ConfigError, match="cuts the 120 inputs of layer 'down' into 60 a rank"):
        int4.check_slices(odd, ranks=2)


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
