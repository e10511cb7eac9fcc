"""Hangs as the console tells them: the watchdog's diagnosis, whatever lies between the files of the ranks."""

import json
import os
from dataclasses import asdict, replace

import pytest

from penstock.obs.metric_names import HANGS_FOLDER
from penstock.obs.run_data import hangs
from penstock.obs.run_data.hangs import HangReports, RecentHangs
from penstock.obs.run_data.run_files import LocalFiles
from tests.unit.obs.test_hang_report import words

STARTS = [
    {"event": "start", "step": 0, "ranks": 2, "time": "2026-01-01T00:00:00+00:00"},
    {"event": "start", "step": 9, "ranks": 4, "time": "2026-01-02T00:00:00+00:00"},
    {"event": "start", "step": 20, "ranks": 8, "time": "2026-01-04T00:00:00+00:00"},
]
AT = 1767398400.0
"""2026-01-03, while four ranks trained."""


def write(run, *found):
    (run / HANGS_FOLDER).mkdir(exist_ok=True)
    for each in found:
        record = asdict(each) | {"collectives": [{"record_id": 1}]}
        (run / HANGS_FOLDER / f"rank-{each.rank:05d}.json").write_text(json.dumps(record))


def read(run):
    return RecentHangs().read(LocalFiles(run), STARTS)


def ranks_of(found):
    return [each.rank for hang in found.hangs for each in hang.words]


def at(rank, collectives, *, after=0.0):
    return replace(words(rank, collectives), at=AT + after)


def test_the_rank_that_the_others_wait_for_is_named_first_and_a_rank_without_a_file_is_missed(tmp_path):
    write(tmp_path, at(0, 90), at(1, 90, after=20), at(2, 88, after=3), at(3, 90))
    (found,) = read(tmp_path).hangs
    assert "Rank 2 on node-2 (pid 102) has begun 88 collectives" in found.text
    assert ([each.rank for each in found.words], found.at) == ([2, 0, 1, 3], AT)
    assert found.words[0].stacks["MainThread"] == ("train (loop.py:1)", "wait (gloo.py:1)")
    (tmp_path / HANGS_FOLDER / "rank-00003.json").unlink()
    assert "Rank 3 wrote nothing" in read(tmp_path).hangs[0].text, "of the four that trained then"


def test_a_file_of_an_earlier_hang_is_another_hang_which_is_not_diagnosed(tmp_path):
    write(tmp_path, at(0, 90), at(1, 80, after=-86400.0))
    first, last = read(tmp_path).hangs
    assert [each.rank for each in first.words] == [1]
    assert "Rank 1 wrote in this hang" in first.text
    assert "wrote nothing" not in first.text, "the files of the others were overwritten"
    assert "Rank 0 waits" in last.text
    assert "Ranks 1, 2, 3 wrote nothing" in last.text


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "[" * 100_000,
        '{"rank": 1}',
        json.dumps(asdict(at(1, 5)) | {"of": "another version"}),
        json.dumps(asdict(at(1, 5)) | {"rank": 2**40}),
        json.dumps(asdict(at(1, 5)) | {"rank": -1}),
        json.dumps(asdict(at(1, 5)) | {"at": 1e300}),
        json.dumps(asdict(at(1, 5)) | {"stacks": {"MainThread": "no list"}}),
    ],
)
def test_a_damaged_file_hides_no_other_and_is_named(tmp_path, content):
    write(tmp_path, at(0, 90))
    (tmp_path / HANGS_FOLDER / "rank-00001.json").write_text(content)
    found = read(tmp_path)
    assert (ranks_of(found), found.unread) == ([0], ("rank-00001.json",))
    assert "Ranks 2, 3 wrote nothing" in found.hangs[0].text
    assert "Rank 1 wrote what was not read" in found.hangs[0].text


def test_files_that_are_too_large_are_named_and_not_read(tmp_path, monkeypatch):
    write(tmp_path, at(0, 90), at(1, 88))
    huge = tmp_path / HANGS_FOLDER / "rank-00002.json"
    with huge.open("wb") as file:
        file.truncate(hangs.MAX_FILE_BYTES + 1)
    assert (read(tmp_path).unread, read(tmp_path).num_beyond) == (("rank-00002.json",), 0)
    monkeypatch.setattr(hangs, "_MAX_BYTES", (tmp_path / HANGS_FOLDER / "rank-00000.json").stat().st_size)
    found = read(tmp_path)
    assert (found.unread, found.num_beyond) == (("rank-00002.json",), 1), (
        "of all together only so much is read"
    )
    assert "Rank 3 wrote nothing" in found.hangs[0].text


def test_links_pipes_and_files_of_other_names_are_no_reports(tmp_path):
    write(tmp_path, at(0, 90))
    folder = tmp_path / HANGS_FOLDER
    (folder / "rank-00001.json").symlink_to(folder / "rank-00000.json")
    (folder / "rank-00000.json.tmp").write_text("{")
    os.mkfifo(folder / "rank-00002.json")
    found = read(tmp_path)
    assert (ranks_of(found), found.unread) == ([0], ())
    assert read(tmp_path / "no run") == HangReports(hangs=(), unread=(), num_beyond=0)


def test_files_are_read_again_only_if_one_of_them_or_the_starts_changed(tmp_path):
    recent, files = RecentHangs(), LocalFiles(tmp_path)
    write(tmp_path, at(0, 90), at(1, 88))
    found = recent.read(files, STARTS)
    assert recent.read(files, STARTS) is found
    later = recent.read(files, STARTS[:1])
    assert "wrote nothing" in found.hangs[0].text
    assert "wrote nothing" not in later.hangs[0].text, "of two ranks"
    (tmp_path / HANGS_FOLDER / "rank-00001.json").unlink()
    assert ranks_of(recent.read(files, STARTS[:1])) == [0]


def test_of_many_ranks_the_states_to_look_at_first_are_kept(tmp_path):
    write(tmp_path, *(at(rank, 90) for rank in range(20)), at(20, 88))
    (hang,) = read(tmp_path).hangs
    assert (hang.num_ranks, len(hang.words), hang.words[0].rank) == (21, 16, 20)
