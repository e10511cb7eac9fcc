"""The console on runs that lie in an object store: found, tabled and drawn by ranged reads, and only read."""

import json
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
import pytest
from starlette.testclient import TestClient
from tests.in_process import run_cli
from tests.integration.remote.faulty import FaultyServer, Reply
from tests.integration.remote.setting import bucket_store, upload

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.state import ConsoleState
from penstock.core.errors import PenstockError
from penstock.obs.run_data import discover, run_files

HOST = "127.0.0.1:8400"
pytestmark = pytest.mark.usefixtures("s3")  # the environment leads to it


@pytest.fixture(autouse=True)
def generations_from_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.obs.run_data.columns.getrandbits", lambda _: 0)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every question look at the store."""
    monkeypatch.setattr(run_files, "_LOOK_AGAIN_S", 0.0)
    monkeypatch.setattr(discover, "_AGAIN_S", 0.0)
    monkeypatch.setattr(discover, "_STORED_AGAIN_S", 0.0)


def lines(first: int, last: int, *, pad: int = 0) -> bytes:
    steps = [{"step": n, "loss": 9 - n / 1000, "step_s": 1.0, "x": "y" * pad} for n in range(first, last + 1)]
    start = [{"event": "start", "step": 0, "ranks": 2, "time": "2026-01-01T00:00:00+00:00"}]
    return b"".join(json.dumps(line).encode() + b"\n" for line in [*(start if first == 1 else []), *steps])


def write(run: Path, content: bytes) -> None:
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"w" * 1000)
    (run / "metrics.jsonl").write_bytes(content)
    (run / "config.json").write_text(json.dumps({"run": {"steps": 90_000}, "optim": {"peak": 0.25}}))


@contextmanager
def client(*roots: str | Path) -> Iterator[TestClient]:
    state = ConsoleState(roots, ConsoleAccess(control=True))
    with TestClient(build_app(state), base_url=f"http://{HOST}") as asked:
        yield asked
    state.close()


def put(s3_url: str, bucket: str, path: str, content: bytes) -> None:
    obstore.put(bucket_store(s3_url, bucket), path, content)


def rows_of(asked: TestClient, search: str = "") -> dict[str, Any]:
    return {row["name"]: row for row in asked.get("/api/runs", params={"search": search}).json()["runs"]}


def curve(asked: TestClient, run_id: str) -> dict[str, Any]:
    found: dict[str, Any] = asked.get(f"/api/runs/{run_id}/curves", params={"metrics": "loss"}).json()
    return found


def test_runs_below_an_address_are_listed_beside_local_ones_and_searched(
    s3_process: str, tmp_path: Path
) -> None:
    for name in ("a/first", "a/second", "b"):
        write(tmp_path / "up" / name, lines(1, 5))
    write(tmp_path / "local" / "own", lines(1, 3))
    root = upload(tmp_path / "up", s3_url=s3_process, bucket="found", prefix="runs")
    with client(root, tmp_path / "local") as asked:
        rows = rows_of(asked)
        assert rows.keys() == {"a/first", "a/second", "b", "own"}
        row = rows["a/first"]
        assert (row["path"], row["step"], row["steps"]) == (f"{root}/a/first", 5, 90_000)
        assert (row["state"], row["loss"], row["ranks"]) == ("training", 9 - 5 / 1000, 2)
        assert rows_of(asked, "peak=0.25").keys() == rows.keys()
        assert rows_of(asked, "no-such-word") == {}


def test_the_table_reads_the_ends_of_a_file_and_curves_read_only_what_is_new(
    s3_process: str, tmp_path: Path
) -> None:
    content = lines(1, 4000, pad=1000)
    write(tmp_path / "up" / "run", content)
    root = upload(tmp_path / "up", s3_url=s3_process, bucket="ends", prefix="runs")
    state = ConsoleState([root], ConsoleAccess())
    (run,) = state.folders.runs()
    store = run.files._store  # type: ignore[attr-defined]  # what it fetched is not told elsewhere
    assert state.rows()[0]["step"] == 4000
    assert store.fetched_bytes < 64 << 10, "of 4 MB"
    assert state.columns(run).num_rows() == 4000
    before = store.fetched_bytes
    assert before > len(content)
    state.columns(run)
    assert store.fetched_bytes == before, "nothing is new"
    put(s3_process, "ends", "runs/run/metrics.jsonl", content + lines(4001, 4100, pad=1000))
    columns = state.columns(run)
    assert (columns.num_rows(), columns.generation) == (4100, 0)
    assert store.fetched_bytes - before < 150 << 10
    state.close()


def test_a_report_of_a_copy_is_written_on_a_command_line(s3_process: str, tmp_path: Path) -> None:
    write(tmp_path / "up" / "run", lines(1, 400))
    packed = b64encode(b"\0\0\x80?").decode()  # 1.0
    own = [{"step": n, "steps": 1, "own_s": packed, "blocked_s": packed} for n in (1, 2)]
    (tmp_path / "up" / "run" / "ranks.jsonl").write_text("".join(json.dumps(each) + "\n" for each in own))
    root = upload(tmp_path / "up", s3_url=s3_process, bucket="report", prefix="runs")
    for name in ("run.html", "run.csv"):
        done = run_cli("report", f"{root}/run", "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
    page = (tmp_path / "run.html").read_text()
    assert 'shown":"own_s","tables":{"own_s":' in page
    assert "This file leaves out data_wait_s, blocked_s" in page
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 401
    refused = run_cli("report", f"{root}/run", "--out", tmp_path / "x.html", "--rows", 1)
    assert (refused.returncode, "a copy in an object store" in " ".join(refused.stderr.split())) == (2, True)
    assert run_cli("report", f"{root}/run").returncode == 2


def test_a_copy_that_was_rewound_or_replaced_is_drawn_as_it_is_now(s3_process: str, tmp_path: Path) -> None:
    write(tmp_path / "up" / "run", lines(1, 50))
    root = upload(tmp_path / "up", s3_url=s3_process, bucket="rewound", prefix="runs")
    with client(root) as asked:
        run_id = rows_of(asked)["run"]["id"]
        assert len(curve(asked, run_id)["x"]) == 50
        put(s3_process, "rewound", "runs/run/metrics.jsonl", lines(1, 20))
        found = curve(asked, run_id)
        assert (found["x"][-1], found["generation"]) == (20, 1)
        obstore.delete(bucket_store(s3_process, "rewound"), "runs/run/metrics.jsonl")
        assert curve(asked, run_id).get("x", [20])[-1] == 20, "deleted while it is watched"


def test_a_run_in_a_store_takes_no_requests_and_says_why(s3_process: str, tmp_path: Path) -> None:
    write(tmp_path / "up" / "run", lines(1, 5))
    root = upload(tmp_path / "up", s3_url=s3_process, bucket="asked", prefix="runs")
    with client(root) as asked:
        run_id = rows_of(asked)["run"]["id"]
        assert not asked.get(f"/api/runs/{run_id}").json()["control"]
        sent = asked.post(
            f"/api/runs/{run_id}/requests", json={"kind": "stop"}, headers={"origin": f"http://{HOST}"}
        )
        assert (sent.status_code, "a copy in an object store" in sent.text) == (400, True)
        assert asked.get(f"/api/runs/{run_id}/ranks").json()["steps"] == []


def test_hangs_and_traces_of_a_copy_are_read(s3_process: str, tmp_path: Path) -> None:
    write(run := tmp_path / "up" / "run", lines(1, 5))
    name = "trace-steps-2-to-3-rank-00001.json.gz"
    for path, content in {f"traces/{name}": b"a trace", "hangs/rank-00000.json": b"{"}.items():
        (run / path).parent.mkdir()
        (run / path).write_bytes(content)
    root = upload(tmp_path / "up", s3_url=s3_process, bucket="hung", prefix="runs")
    with client(root) as asked:
        run_id = rows_of(asked)["run"]["id"]
        assert asked.get(f"/api/runs/{run_id}/hangs").json()["unread"] == ["rank-00000.json"]
        (found,) = asked.get(f"/api/runs/{run_id}/traces").json()["traces"]
        assert (found["name"], found["bytes"]) == (name, 7)
        assert asked.get(f"/api/runs/{run_id}/traces/{name}").content == b"a trace"


def test_a_run_at_a_web_server_is_read_by_its_own_address(web: FaultyServer, tmp_path: Path) -> None:
    write(tmp_path / "web" / "run", lines(1, 5))
    with client(f"{web.url}/run") as asked:
        row = rows_of(asked)["run"]
        assert (row["step"], row["steps"]) == (5, 90_000)
        assert len(curve(asked, row["id"])["x"]) == 5


def test_a_store_that_stops_answering_leaves_what_was_read(
    s3: FaultyServer, s3_process: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discover, "_PATIENCE_S", 0.5)
    write(tmp_path / "up" / "run", lines(1, 5))
    root = upload(tmp_path / "up", s3_url=s3_process, bucket="silent", prefix="runs")
    with client(root) as asked:
        run_id = rows_of(asked)["run"]["id"]
        assert len(curve(asked, run_id)["x"]) == 5
        s3.fault = lambda _: Reply(503)
        assert rows_of(asked)["run"]["step"] == 5
        assert len(curve(asked, run_id)["x"]) == 5


def test_an_address_that_cannot_be_read_is_told_at_once() -> None:
    with pytest.raises(PenstockError, match="cannot be read"):
        ConsoleState(["s3://no-such-bucket/runs"], ConsoleAccess()).folders.runs()
