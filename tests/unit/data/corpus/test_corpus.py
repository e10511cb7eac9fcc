"""Shards as one run of tokens, and every way a shard can lie about itself."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import CorpusError
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.open import open_corpus
from penstock.data.formats.arrow import write_shard
from penstock.testing.corpora import numbered_corpus, write_corpus

LENGTHS = [3, 0, 5, 0, 0, 4, 1, 7]  # shards of two: [3, 0] [5, 0] [0, 4] [1, 7]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    return open_corpus(numbered_corpus(tmp_path / "c", LENGTHS, documents_per_shard=2))


def test_tokens_of_a_range_span_shards(corpus: Corpus) -> None:
    assert corpus.num_tokens == 20
    for start in range(20):
        for stop in range(start + 1, 21):
            assert corpus.tokens(start, stop).tolist() == list(range(start + 1, stop + 1))


def test_positions_are_located_in_their_shards(corpus: Corpus) -> None:
    shards, inside = corpus.locate(np.arange(20))
    assert shards.tolist() == [0] * 3 + [1] * 5 + [2] * 4 + [3] * 8
    assert inside.tolist() == [*range(3), *range(5), *range(4), *range(8)]


def test_fragments_are_cut_at_documents_and_know_whether_theirs_goes_on(corpus: Corpus) -> None:
    found = corpus.fragments([(1, 6), (10, 20), (0, 1)])
    assert found.starts.tolist() == [1, 3, 10, 12, 13, 0]
    assert found.lengths.tolist() == [2, 3, 2, 1, 7, 1]
    assert found.continued.tolist() == [False, True, False, False, False, True]
    assert len(found) == 6


def test_the_next_document_starts_at_or_after_a_position(corpus: Corpus) -> None:
    starts = [0, 3, 8, 12, 13, 20]
    assert [corpus.next_document(p) for p in range(21)] == [
        min(s for s in starts if s >= p) for p in range(21)
    ]


def test_a_shard_without_tokens_is_passed_over(tmp_path: Path) -> None:
    corpus = open_corpus(numbered_corpus(tmp_path, [2, 0, 0, 3], documents_per_shard=1))
    assert corpus.tokens(0, 5).tolist() == [1, 2, 3, 4, 5]
    assert corpus.fragments([(0, 5)]).lengths.tolist() == [2, 3]
    assert [corpus.next_document(p) for p in range(6)] == [0, 2, 2, 5, 5, 5]


def test_opening_a_corpus_reads_its_manifest_and_no_shard(tmp_path: Path) -> None:
    folder = numbered_corpus(tmp_path, LENGTHS)
    for shard in folder.glob("*.arrow"):
        shard.unlink()
    assert open_corpus(str(folder)).num_tokens == 20


def test_a_shard_that_is_missing_when_it_is_needed_is_named(corpus: Corpus) -> None:
    (Path(corpus.location) / "shard-00002.arrow").unlink()
    assert corpus.tokens(0, 8).tolist() == list(range(1, 9)), "the others can be read"
    with pytest.raises(CorpusError, match=r"shard-00002\.arrow is missing\. Restore it"):
        corpus.tokens(7, 9)


def test_a_truncated_shard_is_named_with_its_sizes(corpus: Corpus) -> None:
    shard = Path(corpus.location) / "shard-00001.arrow"
    content = shard.read_bytes()
    shard.write_bytes(content[:-8])
    message = (
        rf"shard-00001\.arrow has {len(content) - 8} bytes, its manifest says {len(content)}\. .*truncated"
    )
    with pytest.raises(CorpusError, match=message):
        corpus.tokens(3, 4)


def test_a_shard_of_another_corpus_in_its_place_is_named_with_what_it_holds(tmp_path: Path) -> None:
    corpus = open_corpus(write_corpus(tmp_path / "one", [[1] * 8, [2] * 8]))
    other = write_corpus(tmp_path / "two", [[1] * 9, [2] * 7, []])
    swapped = Path(corpus.location) / "shard-00000.arrow"
    shutil.copy(other / "shard-00000.arrow", swapped)
    manifest = json.loads((Path(corpus.location) / "manifest.json").read_text())
    manifest["shards"][0]["bytes"] = swapped.stat().st_size  # even where the sizes agree
    manifest["shards"][0]["probe"] = ""  # and it was never probed
    (Path(corpus.location) / "manifest.json").write_text(json.dumps(manifest))
    message = "holds 16 tokens in 3 documents, its manifest says 16 in 2"
    with pytest.raises(CorpusError, match=message):
        open_corpus(Path(corpus.location)).tokens(0, 1)


def test_a_shard_swapped_for_another_of_equal_size_and_counts_is_noticed_when_it_is_opened(
    tmp_path: Path,
) -> None:
    corpus = open_corpus(write_corpus(tmp_path / "one", [[1] * 8, [2] * 8]))
    other = write_corpus(tmp_path / "two", [[1] * 8, [3] * 8])
    shutil.copy(other / "shard-00000.arrow", Path(corpus.location) / "shard-00000.arrow")
    with pytest.raises(CorpusError, match=r"differs from the one in its manifest, although it has the same"):
        corpus.tokens(0, 1)


def test_document_offsets_that_do_not_rise_are_refused(tmp_path: Path) -> None:
    folder = write_corpus(tmp_path, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    shard = folder / "shard-00000.arrow"
    write_shard(shard, np.arange(1, 10, dtype=np.uint16), np.array([0, 6, 3, 9]))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["shards"][0]["probe"] = ""
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CorpusError, match=r"shard-00000\.arrow has document ends that do not rise\. Restore it"
    ):
        open_corpus(folder).fragments([(0, 9)])


def test_a_tokenizer_is_known_only_if_the_corpus_was_made_with_it(corpus: Corpus) -> None:
    assert corpus.tokenizer_path is None
    (Path(corpus.location) / "tokenizer.json").write_text("{}")
    assert corpus.tokenizer_path is None
    manifest = json.loads((Path(corpus.location) / "manifest.json").read_text())
    (Path(corpus.location) / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "aa"}))
    assert open_corpus(Path(corpus.location)).tokenizer_path == Path(corpus.location) / "tokenizer.json"
