"""Document ends searched where they lie: the same answer as numpy's, from a few pages."""

from collections.abc import Callable

import numpy as np
import pytest

from penstock.core.arrays import Array, Int64
from penstock.core.errors import CorpusError
from penstock.data.formats.index import DocumentEnds
from penstock.storage.base import Slices


class Fetching:
    """Slices that come one by one, as from an object store, and are counted."""

    def __init__(self, array: Array) -> None:
        self.array, self.items, self.fetches = array, 0, 0

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice, /) -> Array:
        found = self.array[part].copy()
        self.items, self.fetches = self.items + len(found), self.fetches + 1
        return found


def unaligned(array: Int64) -> Int64:
    return np.frombuffer(b"??" + array.tobytes(), np.uint8)[2:].view(np.int64)


LAYOUTS: list[Callable[[Int64], Slices]] = [lambda array: array, unaligned, Fetching]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["aligned", "unaligned", "far"])
@pytest.mark.parametrize("count", [1, 511, 512, 513, 5000])
def test_the_ends_in_a_range_are_those_that_numpy_finds(
    count: int, layout: Callable[[Int64], Slices]
) -> None:
    rng = np.random.default_rng(count)
    ends = np.cumsum(rng.choice([0, 0, 1, 2, 7], count)) + 1  # runs of empty documents among them
    total = int(ends[-1])
    found = DocumentEnds(layout(ends), num_tokens=total, name="f")
    assert len(found) == count
    for start, stop in np.sort(rng.integers(0, total + 1, (300, 2)), axis=1).tolist():
        assert found.between(start, stop).tolist() == ends[(ends > start) & (ends <= stop)].tolist()


def test_a_search_reads_a_few_pages_of_many() -> None:
    far = Fetching(np.arange(1, 2_000_001, dtype=np.int64))
    found = DocumentEnds(far, num_tokens=2_000_000, name="f")
    assert found.between(1_234_567, 1_234_600).tolist() == list(range(1_234_568, 1_234_601))
    assert far.fetches < 40
    assert far.items < 2000


@pytest.mark.parametrize(
    ("ends", "num_tokens", "message"),
    [
        ([1, 2], 3, r"f has documents that end at token 2 where there are 3 tokens"),
        ([], 3, r"f has documents that end at token 0 where there are 3 tokens"),
    ],
)
def test_ends_that_do_not_end_where_the_tokens_do_are_refused(
    ends: list[int], num_tokens: int, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        DocumentEnds(np.array(ends, np.int64), num_tokens=num_tokens, name="f")


@pytest.mark.parametrize("layout", LAYOUTS, ids=["aligned", "unaligned", "far"])
@pytest.mark.parametrize("ends", [[5, 3, 9], [2**62, 9], [1, 7, 7, 6, 9]])
def test_ends_that_do_not_rise_are_refused_where_they_are_met(
    ends: list[int], layout: Callable[[Int64], Slices]
) -> None:
    found = DocumentEnds(layout(np.array(ends, np.int64)), num_tokens=9, name="f")
    with pytest.raises(CorpusError, match="f has document ends that do not rise"):
        found.between(0, 9)


def test_a_shard_without_documents_has_no_ends() -> None:
    assert DocumentEnds(np.zeros(0, np.int64), num_tokens=0, name="f").between(0, 0).tolist() == []
