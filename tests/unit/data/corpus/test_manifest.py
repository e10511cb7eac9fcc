"""The manifest: round trip, identity by content, clear errors."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import CorpusError
from penstock.data.corpus.manifest import Manifest, ShardEntry, load_manifest, save_manifest, tokenizer_at

SHARDS = tuple(
    ShardEntry(name=f"shard-{i:05d}.arrow", tokens=10 + i, documents=2, bytes=100, checksum=f"{i}")
    for i in range(3)
)
MANIFEST = Manifest(format="arrow", dtype="uint16", vocab_size=300, eos_id=0, text_bytes=99, shards=SHARDS)


def test_loading_what_was_saved_gives_an_equal_manifest(tmp_path: Path) -> None:
    save_manifest(tmp_path, MANIFEST)
    assert load_manifest(tmp_path) == MANIFEST


def test_totals_are_sums_over_shards() -> None:
    assert (MANIFEST.num_tokens, MANIFEST.num_documents) == (33, 6)


@pytest.mark.parametrize(
    "other",
    [
        replace(MANIFEST, shards=SHARDS[::-1]),
        replace(MANIFEST, shards=SHARDS[:2]),
        replace(MANIFEST, shards=(replace(SHARDS[0], checksum="x"), *SHARDS[1:])),
        replace(MANIFEST, vocab_size=301),
        replace(MANIFEST, dtype="uint32"),
    ],
)
def test_the_fingerprint_changes_with_content_and_order(other: Manifest) -> None:
    assert other.fingerprint != MANIFEST.fingerprint


def test_the_fingerprint_ignores_names_of_files() -> None:
    renamed = tuple(replace(shard, name=f"x{shard.name}") for shard in SHARDS)
    assert replace(MANIFEST, shards=renamed).fingerprint == MANIFEST.fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must contain a JSON object"),
        (json.dumps({"format": "arrow"}), "Missing key dtype"),
        (json.dumps({"formats": "arrow"}), "Unknown key formats.*Did you mean 'format'"),
    ],
)
def test_a_damaged_manifest_is_an_error_that_says_how(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(CorpusError, match=rf"manifest\.json is damaged: .*{message}"):
        load_manifest(tmp_path)


def test_a_missing_corpus_and_an_unfinished_one_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="does not exist"):
        load_manifest(tmp_path / "absent")
    with pytest.raises(CorpusError, match=r"has no manifest\.json"):
        load_manifest(tmp_path)


def test_a_corpus_without_tokens_is_an_error(tmp_path: Path) -> None:
    save_manifest(tmp_path, replace(MANIFEST, shards=()))
    with pytest.raises(CorpusError, match="has no tokens"):
        load_manifest(tmp_path)


def test_a_manifest_of_a_later_layout_is_refused(tmp_path: Path) -> None:
    save_manifest(tmp_path, replace(MANIFEST, version=2))
    with pytest.raises(CorpusError, match="has layout 2, this Penstock reads layout 1"):
        load_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../other/shard-00000.arrow", "/etc/passwd", "a/../../b.arrow"])
def test_a_manifest_that_names_files_outside_its_corpus_is_refused(tmp_path: Path, name: str) -> None:
    save_manifest(tmp_path, replace(MANIFEST, shards=(replace(SHARDS[0], name=name),)))
    with pytest.raises(CorpusError, match="names a shard outside the corpus"):
        load_manifest(tmp_path)


def test_a_folder_stands_for_the_tokenizer_in_it(tmp_path: Path) -> None:
    assert tokenizer_at(tmp_path) == tmp_path
    (tmp_path / "tokenizer.json").write_text("{}")
    assert (
        tokenizer_at(str(tmp_path))
        == tokenizer_at(tmp_path / "tokenizer.json")
        == tmp_path / "tokenizer.json"
    )


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("web.parquet", "Name the folder of a corpus."), ("manifest.json", "Name the folder: ")],
)
def test_a_file_is_said_to_be_one(tmp_path: Path, name: str, remedy: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CorpusError, match=rf"{name} is a file, not the folder of a corpus. {remedy}"):
        load_manifest(tmp_path / name)
