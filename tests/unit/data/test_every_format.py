"""Every format serves what the tool wrote: the same documents, token for token."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from penstock.core.arrays import Array
from penstock.core.errors import CorpusError
from penstock.data import Loader, open_corpus
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.open import from_manifest
from penstock.data.formats import FORMATS
from penstock.storage.base import LocalBlob, LocalStorage, Slices
from tests.format_examples import EXAMPLES, Example


def of_folder(example: Example) -> str:
    return example.folder


def documents_of(corpus: Corpus) -> list[list[int]]:
    fragments = corpus.fragments([(0, corpus.num_tokens)])
    assert not fragments.continued.any()
    pairs = zip(fragments.starts.tolist(), fragments.lengths.tolist(), strict=True)
    return [corpus.tokens(start, start + length).tolist() for start, length in pairs]


@pytest.mark.parametrize("example", EXAMPLES, ids=of_folder)
def test_a_format_serves_the_documents_that_its_tool_wrote(example: Example, tmp_path: Path) -> None:
    corpus = open_corpus(example.copy(tmp_path))
    assert documents_of(corpus) == example.documents
    assert corpus.manifest.num_documents == len(example.documents)
    assert corpus.manifest.format == example.format
    assert corpus.tokens(0, 3).dtype == corpus.manifest.dtype == example.dtype
    assert corpus.manifest.vocab_size > max(max(document) for document in example.documents)


@pytest.mark.parametrize("example", EXAMPLES, ids=of_folder)
def test_every_range_has_the_document_ends_that_lie_in_it(example: Example, tmp_path: Path) -> None:
    corpus = open_corpus(example.copy(tmp_path))
    shard = corpus.shard(0)
    ends = np.cumsum([len(document) for document in example.documents])
    ends = ends[ends <= shard.num_tokens]
    for start in range(0, shard.num_tokens, 7):
        for stop in (start, start + 1, start + 30, shard.num_tokens):
            expected = ends[(ends > start) & (ends <= stop)].tolist()
            assert shard.document_ends(start, stop).tolist() == expected


@pytest.mark.parametrize("rule", ["concat", "best_fit"])
@pytest.mark.parametrize("example", EXAMPLES, ids=of_folder)
def test_an_epoch_of_a_format_is_its_corpus_exactly(example: Example, rule: str, tmp_path: Path) -> None:
    loader = Loader(
        {"c": example.copy(tmp_path)},
        sequence_length=16,
        global_batch_size=1,
        packing=rule,
        epochs={"c": 1},
        num_workers=0,
        deliver="numpy",
    )
    seen: Counter[int] = Counter()
    for step in range(loader.num_samples):
        seen.update(loader.batch_at(step)["input_ids"].reshape(-1).tolist())
    expected = Counter(token for document in example.documents for token in document)
    expected[0] += 16 * loader.num_samples - expected.total()  # padding
    assert seen == expected


@pytest.mark.parametrize("example", [e for e in EXAMPLES if not e.options], ids=of_folder)
def test_a_format_is_told_by_the_names_of_its_files(example: Example, tmp_path: Path) -> None:
    spec = example.copy(tmp_path)
    assert open_corpus(tmp_path / "example").fingerprint == open_corpus(spec).fingerprint


def test_every_format_has_an_example() -> None:
    assert {example.format for example in EXAMPLES} == set(FORMATS) - {"arrow", "synthetic"}


class FarBlob(LocalBlob):
    """As a remote object is: never an array of the whole, a copy for each slice."""

    def array(self, dtype: np.typing.DTypeLike, *, offset: int, count: int) -> Slices:
        return Fetching(np.asarray(super().array(dtype, offset=offset, count=count)))


class Fetching:
    def __init__(self, array: Array) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice, /) -> Array:
        return self.array[part].copy()


class FarStorage(LocalStorage):
    def open(self, name: str) -> FarBlob:
        return FarBlob(self.folder / name)


@pytest.mark.parametrize("example", EXAMPLES, ids=of_folder)
def test_a_format_is_read_the_same_through_a_storage_that_fetches(example: Example, tmp_path: Path) -> None:
    near = open_corpus(example.copy(tmp_path))
    far = from_manifest(FarStorage(Path(near.location)), near.manifest, tokenizer_path=None)
    assert documents_of(far) == example.documents


@pytest.mark.parametrize("example", EXAMPLES, ids=of_folder)
def test_a_shard_swapped_for_another_of_equal_size_is_noticed_while_reading(
    example: Example, tmp_path: Path
) -> None:
    spec = example.copy(tmp_path)
    corpus = open_corpus(spec)
    path = Path(corpus.location) / corpus.manifest.shards[0].name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorpusError, match="differs from the one in its manifest"):
        corpus.tokens(0, 1)
