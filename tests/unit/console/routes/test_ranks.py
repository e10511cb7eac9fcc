"""Routes of ranks: where they ran, which were slow, how they hung."""

import json
from base64 import b64decode, b64encode
from dataclasses import asdict

import numpy as np
import pytest

from tests.unit.obs.test_hang_report import words


@pytest.fixture
def run(tmp_path):
    """A run of two ranks whose second start is on other hosts."""
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    records = [{"event": "start", "step": 0, "ranks": 2, "time": "1970-01-01T00:00:00+00:00"}]
    records += [{"step": n, "loss": 3.0} for n in (1, 2)]
    records += [{"event": "ranks", "step": 2, "slowest_rank": 1, "slowest_s": 3.0, "median_s": 1.5}]
    write(folder / "metrics.jsonl", *records)
    values = b64encode(np.array([1, 3], dtype="<f4").tobytes()).decode()
    places = [{"step": n, "ranks": 2, "hosts": [f"{n}a", f"{n}b"], "devices": ["cpu", "cpu"]} for n in (0, 1)]
    own = [{"step": n, "steps": 1, "own_s": values} for n in (1, 2)]
    write(folder / "ranks.jsonl", places[0], own[0], {**places[1], "nics": ["eth0", ""]}, own[1])
    return folder


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_heat_map_has_the_places_of_each_start_and_the_slow_ranks(asked):
    found = asked("ranks").json()
    assert np.frombuffer(b64decode(found["values"]), "<f4").reshape(2, 2).tolist() == [[1, 1], [3, 3]]
    assert (found["steps"], found["num_ranks"], found["means"]) == ([1, 2], 2, [1, 3])
    assert found["starts"] == [
        {"column": 0, "hosts": ["0a", "0b"], "devices": ["cpu", "cpu"], "nics": ["", ""]},
        {"column": 1, "hosts": ["1a", "1b"], "devices": ["cpu", "cpu"], "nics": ["eth0", ""]},
    ]
    assert found["slow"] == [{"step": 2, "rank": 1, "own_s": 3.0, "median_s": 1.5}]


def test_a_hang_is_its_diagnosis_with_the_calls_of_each_rank(asked, run):
    assert asked("hangs").json() == {"hangs": [], "unread": [], "num_unread": 0, "num_beyond": 0}
    (run / "hangs").mkdir()
    write(run / "hangs" / "rank-00000.json", asdict(words(0, 90)))
    write(run / "hangs" / "rank-00001.json", asdict(words(1, 88, call="read (disk.py:9)")))
    (run / "hangs" / "rank-00002.json").write_text("{")
    found = asked("hangs").json()
    (hang,) = found["hangs"]
    assert "Rank 1 on node-1 (pid 101) has begun 88 collectives" in hang["text"]
    assert (hang["time"], hang["num_ranks"]) == ("1970-01-01T00:00:00+00:00", 2)
    assert [one["rank"] for one in hang["ranks"]] == [1, 0]
    assert hang["ranks"][0]["stacks"] == {"MainThread": ["train (loop.py:1)", "read (disk.py:9)"]}
    assert found["unread"] == ["rank-00002.json"]
