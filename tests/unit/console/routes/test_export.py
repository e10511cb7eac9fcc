"""Views as files: attachments under the name of the run, tables as they are filtered, refusals in words."""

import asyncio
import csv
import gc
import io
import json
import re

import pyarrow.parquet as parquet
import pytest
from starlette.testclient import TestClient

from penstock.console import state as console_state
from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.routes import export
from penstock.console.runs.turns import RunBusy
from penstock.console.servers.history import FIRST, ServerHistory
from penstock.console.servers.scrape import Reading, Server
from penstock.console.state import ConsoleState
from penstock.core import clock
from penstock.core.errors import PenstockError
from tests.unit.obs.html_elements import Elements, charts_of, layers_of

EVIL = "=<img src=x>"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    for name, number in (("first", 3), (EVIL, 2)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        records = [{"step": n, "loss": 3.0 + n, "tokens": 10 * n} for n in range(1, number + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "config.json").write_text(json.dumps({"run": {"steps": 3}}))
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "metrics.jsonl").write_text("x\n{}\n")
    (tmp_path / "runs" / "broken" / "config.json").write_text("{}")
    state = ConsoleState([tmp_path / "runs"], ConsoleAccess())
    with TestClient(build_app(state), base_url="http://127.0.0.1:8400") as client:
        client.state = state
        yield client
    state.close()


def test_a_run_that_another_request_holds_for_too_long_is_answered_with_503(asked):
    run = next(run for run in asked.state.folders.runs() if run.name == "first")
    columns = asked.state.columns(run)
    columns._turns.wait_s = 0.05
    with columns._turns.turn():
        for path in ("", "/curves?metrics=loss", "/export.csv"):
            answer = asked.get(f"/api/runs/{run.id}{path}")
            assert (answer.status_code, answer.json()["error"][:15]) == (503, "Another request")
    assert asked.get(f"/api/runs/{run.id}").status_code == 200


def test_columns_that_are_closed_for_others_are_opened_again(asked, monkeypatch):
    monkeypatch.setattr(console_state, "_MOST_OPEN", 1)
    first, second = (run for run in asked.state.folders.runs() if run.name != "broken")
    before = asked.state.columns(first)
    asked.state.columns(second)
    with pytest.raises(RunBusy, match="Ask for it again"):
        before.column("loss")
    assert len(asked.state.columns(first).column("loss"))


def ids(asked):
    return {row["name"]: row["id"] for row in asked.get("/api/runs").json()["runs"]}


def rows_of(answer):
    return [*csv.DictReader(io.StringIO(answer.text))]


def test_a_run_is_its_report_and_its_metrics_as_attachments(asked):
    run = ids(asked)["first"]
    page = asked.get(f"/api/runs/{run}/export.html")
    assert page.headers["content-disposition"] == "attachment; filename*=UTF-8''first.html"
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert layers_of(page.text, "loss")["training"]["y"] == [4, 5, 6]
    table = asked.get(f"/api/runs/{run}/export.csv", params={"metrics": "loss"})
    assert rows_of(table) == [{"step": str(n), "loss": str(3 + n)} for n in (1, 2, 3)]
    whole = parquet.read_table(io.BytesIO(asked.get(f"/api/runs/{run}/export.parquet").content))
    assert whole.column_names == ["step", "loss", "tokens"]


def test_what_writes_a_file_ends_with_the_reader_who_breaks_it_off(asked, monkeypatch):
    closed = []

    def pieces(*_, **__):
        try:
            while True:
                yield b"1,2\n"
        finally:
            closed.append(True)

    async def break_off():
        has_some = asyncio.Event()

        async def receive():
            await has_some.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if message.get("body"):
                has_some.set()

        path, headers = f"/api/runs/{ids(asked)['first']}/export.csv", [(b"host", b"127.0.0.1:8400")]
        scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers}
        await asked.app(scope, receive, send)

    monkeypatch.setattr(export, "exported", pieces)
    gc.disable()  # it would come later, after many downloads
    try:
        asyncio.run(break_off())
        assert closed
    finally:
        gc.enable()


def test_several_runs_are_one_comparison(asked):
    both = ",".join(ids(asked)[name] for name in ("first", EVIL))
    page = asked.get("/api/export.html", params={"runs": both})
    assert set(layers_of(page.text, "loss")) == {"first", EVIL}
    assert "img" not in {tag for tag, _ in Elements(re.sub("<!doctype html>", "", page.text)).found}
    table = rows_of(asked.get("/api/export.csv", params={"runs": both, "metrics": "loss"}))
    assert [row["run"] for row in table] == ["first"] * 3 + [f"'{EVIL}"] * 2
    assert asked.get("/api/export.csv", params={"runs": ids(asked)["first"]}).status_code == 400


def test_the_table_is_taken_along_as_it_is_filtered_and_sorted(asked):
    table = rows_of(asked.get("/api/table.csv", params={"sort": "loss", "down": "true"}))
    assert [row["name"] for row in table] == ["first", f"'{EVIL}", "broken"]
    assert [row["loss"] for row in table] == ["6", "5", ""]
    up = rows_of(asked.get("/api/table.csv", params={"sort": "loss", "down": "false"}))
    assert [row["name"] for row in up] == [f"'{EVIL}", "first", "broken"], "what is unknown comes last"
    found = rows_of(asked.get("/api/table.csv", params={"search": "first"}))
    assert [row["name"] for row in found] == ["first"]
    assert rows_of(asked.get("/api/table.csv", params={"states": "training"})) == []
    page = asked.get("/api/table.html").text
    assert "=&lt;img src=x&gt;" in page
    assert "script-src 'none'" in page
    whole = parquet.read_table(io.BytesIO(asked.get("/api/table.parquet").content))
    assert set(whole["name"].to_pylist()) == {"first", EVIL, "broken"}


def reading(tokens):
    counters = {"penstock_answer_tokens_total": tokens, "penstock_computed_tokens_total": 2 * tokens}
    gauges = {
        "penstock_answers_running": 2.0,
        "penstock_cache_blocks": 8.0,
        "penstock_cache_blocks_used": 2.0,
    }
    return Reading({**counters, **gauges}, {FIRST: ((0.1, tokens), (float("inf"), tokens))})


@pytest.fixture
def watched(monkeypatch):
    """A console that watches two servers, of which one answers; its clock, which a test moves."""
    at = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: at[0])
    monkeypatch.setattr(clock, "unix_seconds", lambda: 1_800_000_000.0 + at[0])

    def read(server):
        if server.name == "gone":
            raise PenstockError(f"{server.url} does not answer")
        return reading(10 * at[0])

    servers = [Server(name=name, url=f"http://{name}.example/hidden-path", key="a-key-of-it")
               for name in (EVIL, "gone")]  # fmt: skip
    state = ConsoleState([], ConsoleAccess())
    state.servers = [ServerHistory(server, read=read) for server in servers]
    with TestClient(build_app(state), base_url="http://127.0.0.1:8400") as client:
        client.at = at
        yield client
    state.close()


def test_servers_are_taken_along_with_what_was_read_of_them_so_far(watched):
    refused = watched.get("/api/servers.html")
    assert (refused.status_code, "No server was read yet" in refused.text) == (400, True)
    for time in (100.0, 102.0, 104.0):
        watched.at[0] = time
        for number in (0, 1):
            watched.get(f"/api/servers/{number}")
    watched.at[0] = 150.0
    page = watched.get("/api/servers.html")
    assert page.headers["content-disposition"] == "attachment; filename*=UTF-8''servers.html"
    assert set(charts_of(page.text)) == {f"{kind}-0" for kind in ("queue", "rate", "first", "cache")}
    rate = layers_of(page.text, "rate-0")["of answers"]
    assert (rate["x"], rate["y"]) == ([2, 4], [10, 10])
    assert charts_of(page.text)["first-0"]["unit"] == "s"
    assert "2027-01-15 08:01:44" in page.text, "the time of the last reading, not of the file"
    assert "img" not in {tag for tag, _ in Elements(re.sub("<!doctype html>", "", page.text)).found}
    table = watched.get("/api/servers.csv")
    assert [(row["server"], row["time"], row["answer_tokens_per_s"]) for row in rows_of(table)] == [
        (f"'{EVIL}", "1800000100", ""),
        (f"'{EVIL}", "1800000102", "10"),
        (f"'{EVIL}", "1800000104", "10"),
    ]
    for secret in ("a-key-of-it", "hidden-path", ".example"):
        assert secret not in page.text + table.text


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/runs/{first}/export.csv?metrics=lss", 400, "Did you mean 'loss'?"),
        ("/api/runs/{first}/export.exe", 422, "html"),
        ("/api/runs/{broken}/export.html", 400, "Line 1 of metrics.jsonl is not a JSON object"),
        ("/api/runs/0000/export.csv", 404, "There is no such run"),
        ("/api/table.csv?sort=id", 400, "no such column"),
    ],
)
def test_what_cannot_be_written_is_refused_in_words(asked, path, status, said):
    found = asked.get(path.format(**{name: run for name, run in ids(asked).items() if name != EVIL}))
    assert (found.status_code, said in found.text) == (status, True)
