"""Conversion: the same documents, whole or not at all, and back again byte for byte."""

from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusError, UsageError
from penstock.data import open_corpus
from penstock.data.tools.convert import convert, spans
from penstock.data.tools.verify import verify
from penstock.testing.corpora import numbered_corpus, write_corpus
from tests.format_examples import EXAMPLES, Example

LENGTHS = [0, 0, 3, 0, 5, 1, 40, 0, 2, 7, 0]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def documents_of(path: Path) -> list[list[int]]:
    corpus = open_corpus(path)
    found = []
    for index in range(len(corpus.manifest.shards)):
        for start, stop, offsets in spans(corpus.shard(index), 10**9):
            tokens = corpus.shard(index).tokens[start:stop]
            found += [part.tolist() for part in np.split(tokens, offsets[1:-1])]
    return found


@pytest.mark.parametrize("vocab_size", [65_536, 100_000])
def test_to_megatron_and_back_is_the_same_corpus_byte_for_byte(tmp_path: Path, vocab_size: int) -> None:
    documents = [[vocab_size - 1 - n] * n for n in LENGTHS]
    own = write_corpus(tmp_path / "own", documents, vocab_size=vocab_size, documents_per_shard=4)
    convert(own, tmp_path / "megatron", to="megatron")
    convert(tmp_path / "megatron", tmp_path / "back", to="arrow")
    assert content(tmp_path / "back") == content(own)
    assert documents_of(tmp_path / "megatron") == documents
    assert verify(tmp_path / "megatron").faults == ()


@pytest.mark.parametrize("to", ["arrow", "megatron"])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.folder)
def test_every_format_can_be_converted(tmp_path: Path, example: Example, to: str) -> None:
    manifest = convert(example.copy(tmp_path), tmp_path / "out", to=to)
    assert documents_of(tmp_path / "out") == example.documents
    assert manifest.num_documents == len(example.documents)
    assert verify(tmp_path / "out").faults == ()


@pytest.mark.parametrize("limit", [1, 2, 5, 8, 39, 10**6])
def test_larger_shards_are_cut_between_documents_and_no_document_is_lost(tmp_path: Path, limit: int) -> None:
    own = numbered_corpus(tmp_path / "own", LENGTHS)
    manifest = convert(own, tmp_path / "out", to="arrow", shard_tokens=limit)
    assert [len(document) for document in documents_of(tmp_path / "out")] == LENGTHS
    assert documents_of(tmp_path / "out") == documents_of(own)
    for shard in manifest.shards:
        assert shard.tokens <= limit or shard.tokens in LENGTHS


def test_what_belongs_to_the_corpus_goes_with_it(tmp_path: Path) -> None:
    own = write_corpus(tmp_path / "own", [[1, 2, 0]])
    manifest = convert(f"{own}", tmp_path / "out", to="megatron")
    assert (manifest.vocab_size, manifest.eos_id) == (65_536, None)
    foreign = convert(f"megatron:{tmp_path / 'out'},eos_id=0,vocab_size=9", tmp_path / "again", to="arrow")
    assert (foreign.vocab_size, foreign.eos_id, foreign.options) == (9, 0, {})


def test_an_existing_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    own = write_corpus(tmp_path / "own", [[1]])
    before = content(own)
    with pytest.raises(UsageError, match=r"--out .*own exists\. Name a folder that does not"):
        convert(own, own, to="arrow")
    assert content(own) == before


def test_shards_of_no_tokens_are_refused(tmp_path: Path) -> None:
    own = write_corpus(tmp_path / "own", [[1]])
    with pytest.raises(UsageError, match=r"--shard-tokens must be at least 1 \(got 0\)"):
        convert(own, tmp_path / "out", to="arrow", shard_tokens=0)


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    own = write_corpus(tmp_path / "own", [[1], [2**31]], vocab_size=2**32, documents_per_shard=1)
    with pytest.raises(CorpusError, match="no type for token ids of"):
        convert(own, tmp_path / "out", to="megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_what_a_killed_conversion_left_is_cleared(tmp_path: Path) -> None:
    own = write_corpus(tmp_path / "own", [[1]])
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "shard-00077.arrow").write_bytes(b"half")
    convert(own, tmp_path / "out", to="arrow")
    assert content(tmp_path / "out") == content(own)


def test_progress_ends_at_the_tokens_of_the_corpus(tmp_path: Path) -> None:
    own = numbered_corpus(tmp_path / "own", LENGTHS, documents_per_shard=2)
    seen: list[tuple[int, int]] = []
    convert(own, tmp_path / "out", to="arrow", on_progress=lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, sum(LENGTHS))
    assert seen[-1] == (sum(LENGTHS), sum(LENGTHS))
