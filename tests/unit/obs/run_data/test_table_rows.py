"""Rows of runs in object stores: one that does not answer holds up nobody, and is shown once it has."""

import json
from threading import Event

import pytest

from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.run_files import LocalFiles
from penstock.obs.run_data.run_row import Summaries
from penstock.obs.run_data.table_rows import TableRows


class SlowFiles(LocalFiles):
    """A run in an object store that answers once a test lets it."""

    is_stored = True

    def __init__(self, folder, bucket):
        super().__init__(folder)
        self.location = f"s3://{bucket}/{folder.name}"
        self.may_answer, self.looks = Event(), 0

    def seen(self, name):
        self.looks += name == "metrics.jsonl"
        assert self.may_answer.wait(60)
        return self.stamp(name)


def make(folder, last):
    folder.mkdir(parents=True, exist_ok=True)
    records = [{"step": step, "loss": 3.0} for step in range(1, last + 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def table():
    found = TableRows(Summaries())
    yield found
    found.close()


@pytest.fixture
def slow(tmp_path):
    """Runs of a bucket that does not answer, more than threads ask it at once."""
    files = [SlowFiles(make(tmp_path / f"slow-{n}", 4), "slow") for n in range(40)]
    yield [FoundRun(f"s{n}", f"slow-{n}", each) for n, each in enumerate(files)]
    for each in files:
        each.may_answer.set()


def answer(runs):
    for run in runs:
        run.files.may_answer.set()


def test_a_bucket_that_does_not_answer_holds_up_no_other_run(table, slow, tmp_path):
    own = FoundRun("own", "own", LocalFiles(make(tmp_path / "own", 3)))
    quick = FoundRun("quick", "quick", SlowFiles(make(tmp_path / "quick", 5), "quick"))
    answer([quick])
    while (rows := table.of([*slow, own, quick], most_s=0.05))[-1]["step"] is None:
        pass  # a busy machine
    assert [row["step"] for row in rows] == [*[None] * 40, 3, 5]
    assert rows[0]["error"] == "Its object store has not answered yet."
    assert max(run.files.looks for run in slow) == 1, "nobody asks for what is being asked for"
    answer(slow)
    assert [row["step"] for row in table.of([*slow, own], most_s=None)] == [*[4] * 40, 3]


def test_until_a_bucket_answers_again_its_runs_are_as_they_were(table, slow):
    run = slow[0]
    answer([run])
    assert table.of([run], most_s=None)[0]["step"] == 4
    run.files.may_answer.clear()
    make(run.folder, 6)
    (before,) = table.of([run], most_s=0)
    assert (before["step"], before["error"]) == (4, None)
    answer([run])
    assert table.of([run], most_s=None)[0]["step"] == 6
    table.forget([])
    run.files.may_answer.clear()
    assert table.of([run], most_s=0)[0]["step"] is None


def test_what_reading_raises_is_raised_and_the_run_is_read_again(table, slow, monkeypatch):
    run = slow[0]
    answer([run])
    with monkeypatch.context() as broken:
        broken.setattr(Summaries, "row", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            table.of([run], most_s=None)
    assert table.of([run], most_s=None)[0]["step"] == 4
