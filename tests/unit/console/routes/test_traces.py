"""Traces of a run, downloaded: files of their own names only."""

import gzip
import os

import pytest

from penstock.console.routes import traces

NAME = "trace-steps-20-to-22-rank-00001.json.gz"
MEMORY = "memory-steps-3-to-3-rank-00000.pickle"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "runs" / "first"
    (folder / "traces").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    return folder


def test_traces_are_listed_newest_first_with_their_sizes_and_downloaded(asked, run, monkeypatch):
    content = gzip.compress(b"{}" * 1000)
    monkeypatch.setattr(traces, "_READ_BYTES", 7)
    for time, name in ((10.5, NAME), (20, MEMORY)):
        (run / "traces" / name).write_bytes(content)
        os.utime(run / "traces" / name, (time, time))
    assert asked("traces").json() == {
        "traces": [
            {"name": MEMORY, "bytes": len(content), "time": 20},
            {"name": NAME, "bytes": len(content), "time": 10.5},
        ],
        "num_traces": 2,
    }
    found = asked(f"traces/{NAME}")
    assert found.content == content
    assert found.headers["content-disposition"] == f'attachment; filename="{NAME}"'
    monkeypatch.setattr(traces, "_MAX_LISTED", 1)
    assert [len(asked("traces").json()["traces"]), asked("traces").json()["num_traces"]] == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        NAME,  # none of this run
        "..%2fconfig.json",
        "..%2f" + NAME,
        "config.json",
        "trace-steps-1-to-2-rank-00000.json.gz%0a",
        "trace-steps-\u0661-to-2-rank-00000.json.gz",
        "link-steps-1-to-2-rank-00000.json.gz",
        "trace-steps-1-to-2-rank-00000.json.gz",  # a link
        "trace-steps-3-to-4-rank-00000.json.gz",  # a folder
        "trace-steps-5-to-6-rank-00000.json.gz",  # a pipe
    ],
)
def test_no_other_file_is_sent(asked, run, name):
    (run / "config.json").write_text('{"secret": 1}')
    (run / "traces" / "config.json").write_text('{"secret": 1}')
    (run / NAME).write_text("above")
    (run / "traces" / "trace-steps-1-to-2-rank-00000.json.gz").symlink_to(run / "config.json")
    (run / "traces" / "trace-steps-3-to-4-rank-00000.json.gz").mkdir()
    os.mkfifo(run / "traces" / "trace-steps-5-to-6-rank-00000.json.gz")
    assert asked(f"traces/{name}").status_code == 404
    assert asked("traces").json() == {"traces": [], "num_traces": 0}
