"""How a model's folder says that it should draw, and how short its vectors may be."""

import pytest

from penstock.core.errors import InputError
from penstock.engine.sampling_params import Sampling
from penstock.engine.text_processor import TextProcessor
from penstock.text.tokenizer import train_tokenizer


@pytest.fixture
def load(tmp_path):
    train_tokenizer(["penstock"] * 3, vocab_size=260).save(tmp_path / "tokenizer.json")

    def load(text):
        (tmp_path / "generation_config.json").write_text(text)
        return TextProcessor.load(tmp_path / "tokenizer.json").sampling

    return load


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("{}", ()),
        ('{"is_matryoshka": false}', ()),
        ('{"is_matryoshka": true}', None),
        ('{"is_matryoshka": true, "matryoshka_dimensions": [64, 128]}', (64, 128)),
    ],
)
def test_a_model_says_to_which_lengths_its_vectors_may_be_cut(tmp_path, text, lengths):
    train_tokenizer(["penstock"] * 3, vocab_size=260).save(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(text)
    assert TextProcessor.load(tmp_path / "tokenizer.json").embedding.lengths == lengths


def test_settings_are_read_and_others_left(load):
    text = '{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true, "eos_token_id": 5}'
    assert load(text) == {"temperature": 0.6, "top_k": 20}
    assert load('{"top_k": 0}') == load('{"top_k": -1}') == {}  # all tokens


@pytest.mark.parametrize(
    "value",
    ['"high"', "true", "[1]", "NaN", "1e999", "9" * 400],
    ids=["text", "bool", "list", "nan", "inf", "long"],
)
def test_what_is_no_number_to_draw_by_is_refused(load, value):
    with pytest.raises(InputError, match=r"generation_config.json"):
        load(f'{{"temperature": {value}}}')


def test_requests_that_name_no_sampling_are_drawn_as_the_folder_says_or_at_temperature_1(load, tmp_path):
    for text, wanted in (
        ('{"temperature": 0.6, "top_k": 20}', Sampling(temperature=0.6, top_k=20)),
        ("{}", Sampling(temperature=1.0, top_p=1.0)),
    ):
        load(text)
        assert TextProcessor.load(tmp_path / "tokenizer.json").default_sampling == wanted
