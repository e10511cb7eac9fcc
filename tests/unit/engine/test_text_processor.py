"""Text processors of adapters: whose tokenizer cuts their text, and folders that are damaged."""

import json

import pytest
import tokenizers

from penstock.core.errors import InputError
from penstock.engine.text_processor import TextProcessor
from penstock.text.tokenizer import train_tokenizer

BASE = train_tokenizer(["the penstock feeds the turbine"] * 9, vocab_size=280)


def content(**changes):
    return {**json.loads(BASE.content), **changes}


def written(folder, stored):
    folder.mkdir()
    path = folder / "tokenizer.json"
    path.write_text(stored if isinstance(stored, str) else json.dumps(stored))
    return folder


@pytest.fixture
def model(tmp_path):
    return TextProcessor.load(written(tmp_path / "model", content()) / "tokenizer.json")


def test_padding_that_a_file_names_begins_no_prompt(tmp_path):
    padded = tokenizers.Tokenizer.from_str(BASE.content.decode())
    padded.enable_padding(direction="left", length=8, pad_id=3)
    folder = written(tmp_path / "model", padded.to_str())
    text = TextProcessor.load(folder / "tokenizer.json")
    assert text.encode("the") == BASE.encode("the")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # a panic when it is read
        {"model": {"type": "WordLevel", "vocab": {"x": 0}, "unk_token": "y"}, "pre_tokenizer": None},
    ],
    ids=["panics when read", "lacks what it needs"],
)
def test_a_damaged_tokenizer_is_an_error_that_names_its_file(model, tmp_path, changes):
    folder = written(tmp_path / "bad", content(**changes))
    with pytest.raises(InputError, match=r"bad/tokenizer\.json: Not a tokenizer \(.*\)\. \w+ .*\."):
        model.add_adapter("a", folder)
    assert model.adapters == {}
    with pytest.raises(InputError, match="Not a tokenizer"):
        TextProcessor.load(folder / "tokenizer.json")
