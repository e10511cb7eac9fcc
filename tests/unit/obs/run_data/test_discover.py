"""Search of object stores for runs: one that is slow or away holds up neither callers nor other stores."""

from threading import Event

import pytest

from penstock.core import clock
from penstock.core.errors import CorpusError
from penstock.obs.run_data import discover
from penstock.obs.run_data.discover import RunFolders
from penstock.storage.address import parse
from penstock.storage.object_store import Identity, StoredObject


class Bucket:
    """An object store with some runs."""

    def __init__(self, name):
        self.address = parse(f"s3://{name}/runs")
        self.runs, self.is_away, self.answers = [f"{name}-1"], False, Event()
        self.answers.set()

    def folder(self, name=""):
        assert self.answers.wait(60)
        if self.is_away:
            raise CorpusError(f"{self.address.url} is away")
        if not name:
            return self.runs, {}
        return [], {"metrics.jsonl": StoredObject(Identity(size=1, tag="a"), len(self.runs))}


@pytest.fixture
def buckets(monkeypatch):
    found = {bucket.address.url: bucket for bucket in (Bucket("a"), Bucket("b"))}
    monkeypatch.setattr(discover, "_store", found.__getitem__)
    monkeypatch.setattr(discover, "_AGAIN_S", 0.0)
    monkeypatch.setattr(discover, "_STORED_AGAIN_S", 0.0)
    return [*found.values()]


@pytest.fixture
def folders(buckets):
    return RunFolders([bucket.address.url for bucket in buckets])


def names(folders):
    return [run.name for run in folders.runs()]


def test_a_store_that_is_away_keeps_its_runs_and_those_of_others_are_found(folders, buckets):
    assert names(folders) == ["a-1", "b-1"]
    buckets[0].is_away = True
    buckets[1].runs = ["b-1", "b-2"]
    assert names(folders) == ["a-1", "b-1", "b-2"]
    (*_, newest) = folders.runs()
    assert newest.files.seen("metrics.jsonl").modified_s == 2


def test_a_store_that_answers_slowly_is_waited_for_by_nobody_for_long(folders, buckets, monkeypatch):
    assert names(folders) == ["a-1", "b-1"]
    monkeypatch.setattr(discover, "_MAX_WAIT_S", 0.01)
    buckets[0].answers.clear()
    buckets[0].runs = ["a-1", "a-2"]
    assert names(folders) == ["a-1", "b-1"]
    buckets[0].answers.set()
    end = clock.monotonic() + 60
    while names(folders) != ["a-1", "a-2", "b-1"]:
        assert clock.monotonic() < end
        clock.sleep(0.01)


def test_a_store_that_is_away_at_first_is_told(folders, buckets):
    buckets[1].is_away = True
    with pytest.raises(CorpusError, match="s3://b/runs is away"):
        folders.runs()
