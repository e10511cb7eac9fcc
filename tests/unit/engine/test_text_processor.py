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


def test_an_adapter_whose_tokenizer_makes_a_plain_entry_of_the_model_special_is_cut_there(tmp_path):
    turn = "<|turn|>"
    stored = content()
    stored["model"]["vocab"][turn] = 280  # which no merge yields
    model = TextProcessor.load(written(tmp_path / "model", stored) / "tokenizer.json")
    marked = tokenizers.Tokenizer.from_str(json.dumps(stored))
    marked.add_special_tokens([turn])
    folder = written(tmp_path / "a", marked.to_str())
    (folder / "chat_template.jinja").write_text(turn + "{{ messages[0].content }}")
    model.add_adapter("a", folder)
    own = model.of("a")
    assert own.tokenizer.vocabulary() == model.tokenizer.vocabulary()
    assert own.encode_chat([{"role": "user", "content": "the"}]) == [280, *BASE.encode("the")]
    assert own.stream(shown=[280]).push(280) == turn
    assert own.stream().push(280) == ""


def test_equal_tokenizers_are_held_once_however_their_files_were_written(model, tmp_path):
    grown = tokenizers.Tokenizer.from_str(BASE.content.decode())
    grown.add_special_tokens(["<call>"])
    padded = tokenizers.Tokenizer.from_str(BASE.content.decode())
    padded.enable_padding(length=8)
    padded.enable_truncation(4)
    for name, stored in (
        ("same", content()),
        ("padded", padded.to_str(pretty=True)),
        ("one", grown.to_str()),
        ("another", grown.to_str(pretty=True)),
    ):
        model.add_adapter(name, written(tmp_path / name, stored))
    assert model.of("same").tokenizer is model.of("padded").tokenizer is model.tokenizer
    assert model.of("one").tokenizer is model.of("another").tokenizer is not model.tokenizer
    assert model.of("one")._singles is model.of("another")._singles is not model._singles


@pytest.mark.parametrize("of_adapter", [False, True])
def test_markers_of_a_template_that_the_vocabulary_lacks_are_named_in_the_log(tmp_path, caplog, of_adapter):
    marked = tokenizers.Tokenizer.from_str(BASE.content.decode())
    marked.add_special_tokens(["<|turn|>"])
    folder = written(tmp_path / "tuned", marked.to_str())
    model = TextProcessor.load(written(tmp_path / "model", content()) / "tokenizer.json")
    for template, lacking in (
        ("<|turn|><|user|>{{ messages[0].content }}", None),
        ("<|{{role}}|>{{ '<|'+role+'|>' }}", None),
        ("{{ bos_token }}<|turn|><end_of_turn>", "<s>, <end_of_turn>"),
    ):
        (folder / "chat_template.jinja").write_text(template)
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
        model.add_adapter("a", folder) if of_adapter else TextProcessor.load(folder / "tokenizer.json")
        said = f"vocabulary of {folder} lacks tokens that its chat template names ({lacking}), so the model"
        assert (said in caplog.text) == ("lacks" in caplog.text) == (lacking is not None)


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
        {  # a panic at the first text
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
    ids=["panics when read", "lacks what it needs", "panics at a text"],
)
def test_a_damaged_tokenizer_is_an_error_that_names_its_file(model, tmp_path, changes):
    folder = written(tmp_path / "bad", content(**changes))
    with pytest.raises(InputError, match=r"bad/tokenizer\.json: Not a tokenizer \(.*\)\. \w+ .*\."):
        model.add_adapter("a", folder)
    assert model.adapters == {}
    with pytest.raises(InputError, match="Not a tokenizer"):
        TextProcessor.load(folder / "tokenizer.json")
