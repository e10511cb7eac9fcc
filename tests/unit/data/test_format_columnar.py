"""What the readers of columns share: runs, groups, the choice of a column and of a split."""

from pathlib import Path

import numpy as np
import pytest

from penstock.core.arrays import Int64
from penstock.core.errors import CorpusError, UsageError
from penstock.data.formats.choice import column_of, in_order, one_split
from penstock.data.formats.index import DocumentEnds
from penstock.data.formats.runs import GroupedEnds, run_shard, runs_of, starts_of
from penstock.storage.base import Blob, LocalBlob, Slices

DATA = np.arange(100, 130, dtype="<u2").tobytes()
PLACES = np.array([40, 0, 0, 10], np.int64)  # items 20.., 0.., none, 5..
STARTS = starts_of(np.array([4, 3, 0, 5]))
JOINED = [120, 121, 122, 123, 100, 101, 102, 105, 106, 107, 108, 109]


def blob_of(data: bytes, folder: Path) -> LocalBlob:
    (folder / "x").write_bytes(data)
    return LocalBlob(folder / "x")


def runs(blob: Blob, places: Int64 = PLACES) -> Slices:
    return runs_of(blob, "uint16", places=places, starts=STARTS)


def test_every_slice_of_runs_is_that_of_the_joined_tokens(tmp_path: Path) -> None:
    found = runs(blob_of(DATA, tmp_path))
    for start in range(13):
        for stop in range(14):
            assert found[start:stop].tolist() == JOINED[start:stop]
    assert len(found) == 12


def test_a_slice_inside_one_run_is_a_view_of_the_file(tmp_path: Path) -> None:
    blob = blob_of(DATA, tmp_path)
    mapped, found = blob.array("uint8", offset=0, count=blob.size)[0 : blob.size], runs(blob)
    assert np.shares_memory(found[4:7], mapped)
    assert not np.shares_memory(found[3:5], mapped)


def test_runs_may_lie_at_odd_bytes(tmp_path: Path) -> None:
    assert runs(blob_of(b"\0" + DATA, tmp_path), PLACES + 1)[0:12].tolist() == JOINED


def test_a_run_may_end_with_the_file_and_not_a_byte_later(tmp_path: Path) -> None:
    places = np.array([len(DATA) - 4 * 2, 0, 0, 10], np.int64)  # the first run has 4 items
    blob = blob_of(DATA, tmp_path)
    assert runs(blob, places)[0:4].tolist() == [126, 127, 128, 129]
    places[0] += 1
    with pytest.raises(CorpusError, match="x ends before its tokens do"):
        runs(blob, places)


def test_the_ends_of_groups_are_those_of_all_documents() -> None:
    ends = [[0, 2, 2], [], [1, 1], [], [0, 3]]
    starts = starts_of(np.array([2, 0, 1, 0, 3]))
    totals = np.diff(starts).tolist()

    def ends_of(group: int) -> DocumentEnds:
        return DocumentEnds(np.array(ends[group], np.int64), num_tokens=totals[group], name="x")

    grouped = GroupedEnds(starts, ends_of)
    everything = np.array([0, 2, 2, 3, 3, 3, 6])
    for start in range(-1, 7):
        for stop in range(start, 7):
            expected = everything[(everything > start) & (everything <= stop)]
            assert grouped.between(start, stop).tolist() == expected.tolist(), (start, stop)


@pytest.mark.parametrize(("value", "shown"), [(-1, "-1"), (2**32, "4294967296")])
def test_a_number_that_is_no_token_id_is_an_error_with_its_document(value: int, shown: str) -> None:
    stored = np.array([1, 2, 3, value, 5], np.int64)
    ends = DocumentEnds(np.array([2, 2, 5]), num_tokens=5, name="x")
    shard = run_shard(stored, "int64", 3, ends.between, name="part.arrow")
    assert shard.tokens[0:3].tolist() == [1, 2, 3]
    with pytest.raises(CorpusError, match=rf"part\.arrow has token {shown} in document 2, which is no token"):
        shard.tokens[0:5]


def test_the_only_column_that_can_hold_tokens_needs_no_name() -> None:
    assert column_of(["ids"], {}, name="f", what="lists") == "ids"
    assert column_of(["ids", "mask"], {"column": "mask"}, name="f", what="lists") == "mask"


def test_a_column_that_is_not_clear_is_an_error_with_the_candidates() -> None:
    with pytest.raises(UsageError, match=r"f has several columns of lists: ids, mask.*',column=ids'"):
        column_of(["ids", "mask"], {}, name="f", what="lists")
    with pytest.raises(UsageError, match=r"f has no column of lists of that name \(got 'idz'\).*'ids'"):
        column_of(["ids", "mask"], {"column": "idz"}, name="f", what="lists")
    with pytest.raises(CorpusError, match="f has no column of lists"):
        column_of([], {}, name="f", what="lists")


def test_of_several_splits_the_one_for_training_is_read() -> None:
    assert one_split({"a/train": ["x"], "a/test": ["y"]}) == ["x"]
    assert one_split({"part": ["x"]}) == ["x"]
    assert one_split({}) == []
    with pytest.raises(UsageError, match=r"2 splits.*\['dev', 'test'\].*Name the folder of one split"):
        one_split({"test": ["y"], "dev": ["z"]})


def test_files_are_in_the_order_of_their_numbers() -> None:
    names = [f"data-{n:05}-of-100002.arrow" for n in (99_999, 100_000, 100_001, 5)]
    assert [int(name.split("-")[1]) for name in in_order(names)] == [5, 99_999, 100_000, 100_001]
