"""`text:` corpora by their name: options, the cache folder, and what is refused before anything starts."""

import os
from pathlib import Path

import pytest

from penstock.core.errors import UsageError
from penstock.data.corpus.open import described, open_corpus, vocab_size_of
from penstock.data.corpus.spec import TEXT, Spec, absolute, parse_spec
from penstock.data.prepare.text_corpus import folder_of
from penstock.text.tokenizer import Tokenizer


def spec(inputs: Path, tokenizer: Path, **options: str) -> Spec:
    return Spec(TEXT, str(inputs), {"tokenizer": str(tokenizer), **options})


def test_values_of_options_may_be_paths() -> None:
    found = parse_spec("text:/data/a,b.jsonl,tokenizer=/models/x/tokenizer.json,part_tokens=10M")
    assert found.location == "/data/a,b.jsonl"
    assert found.options == {"part_tokens": "10M", "tokenizer": "/models/x/tokenizer.json"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("text:a.jsonl,tokeniser=x", r"no such option .*tokeniser.*Did you mean 'tokenizer'"),
        ("text:a.jsonl,tokenizer=x,tokenizer=y", "given twice"),
        ("text:,tokenizer=x", r"has no path .*Write text:PATH,tokenizer=FILE"),
        ("text:a.jsonl", r"needs a tokenizer\. Write .*tokenizer=FILE.*--train-tokenizer 32000"),
        ("text:s3://bucket/a.jsonl,tokenizer=x", "read from local files"),
        ("text:none.jsonl,tokenizer={t}", "does not exist"),
        ("text:{i},tokenizer=none.json", r"none\.json does not exist"),
        ("text:{i},tokenizer={t},part_tokens=many", "Not a count or size"),
        ("text:{i},tokenizer={t},part_tokens=0", "--part-tokens must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    inputs: Path, tokenizer: Path, text: str, message: str
) -> None:
    with pytest.raises(Exception, match=message) as caught:
        open_corpus(text.format(i=inputs, t=tokenizer))
    assert type(caught.value).__module__ == "penstock.core.errors"
    assert not (inputs.parent / ".penstock").exists()


def test_the_vocabulary_is_known_before_a_token_is(inputs: Path, tokenizer: Path) -> None:
    assert vocab_size_of(f"text:{inputs},tokenizer={tokenizer}") == Tokenizer.load(tokenizer).vocab_size
    assert not (inputs.parent / ".penstock").exists()


def test_the_cache_lies_beside_the_inputs_and_is_found_again_from_anywhere(
    inputs: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(spec(inputs, tokenizer))
    assert folder.parent == inputs.parent / ".penstock"
    monkeypatch.chdir(inputs)
    assert folder_of(spec(Path("../in"), tokenizer)) == folder
    assert folder_of(spec(inputs, tokenizer, max_errors="3")) == folder, "decides no byte"


def test_a_named_cache_holds_a_folder_for_each_text(inputs: Path, tokenizer: Path, tmp_path: Path) -> None:
    folders = {
        folder_of(spec(path, tokenizer, cache=str(tmp_path / "cache")))
        for path in (inputs, inputs / "a.txt", inputs / "c.jsonl")
    }
    assert {folder.parent for folder in folders} == {tmp_path / "cache"}
    assert len(folders) == 3


def test_inputs_beside_which_nothing_can_be_written_are_cached_for_the_user(
    inputs: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "user"))
    (inputs.parent / ".penstock").write_text("in the way")
    assert folder_of(spec(inputs, tokenizer)).is_relative_to(tmp_path / "user")


@pytest.mark.parametrize("change", ["touch", "grow", "add", "option", "tokenizer"])
def test_other_inputs_or_options_get_another_folder(inputs: Path, tokenizer: Path, change: str) -> None:
    before = folder_of(spec(inputs, tokenizer))
    options, given = {}, tokenizer
    match change:
        case "touch":
            os.utime(inputs / "d.txt", ns=(1, 1))
        case "grow":
            (inputs / "d.txt").write_text("longer")
        case "add":
            (inputs / "e.txt").write_text("new")
        case "option":
            options = {"column": "body"}
        case "tokenizer":
            given = inputs.parent / "other.json"
            given.write_text(tokenizer.read_text() + "\n")
    assert folder_of(spec(inputs, given, **options)) != before


def test_a_text_is_no_set_of_files_to_convert_or_index() -> None:
    with pytest.raises(UsageError, match="has no token files"):
        described(parse_spec("text:a.jsonl,tokenizer=x"))


def test_a_name_is_made_absolute_with_the_paths_in_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = absolute("text:a,b.jsonl,tokenizer=t.json,cache=../c,part_tokens=10M")
    here = tmp_path
    assert found == f"text:{here}/a,b.jsonl,cache={here.parent}/c,part_tokens=10M,tokenizer={here}/t.json"
    assert absolute(found) == found
    assert absolute("olmo:o,dtype=uint32") == f"olmo:{here}/o,dtype=uint32"
    assert absolute("arrow:a") == f"arrow:{here}/a"
    assert absolute("corpora/web") == f"{here}/corpora/web"
