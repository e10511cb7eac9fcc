"""The stream of events over HTTP: what a page is sent while the files of its runs change."""

import json
import shutil
import socket
from contextlib import contextmanager
from threading import Thread
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import uvicorn

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.routes import stream
from penstock.console.runs import discover
from penstock.console.state import ConsoleState

STILL_HERE = ("comment", "still here")


class ServedConsole:
    """A console over a folder of runs, served by uvicorn in a thread."""

    def __init__(self, folder):
        self.folder = folder
        self.state = ConsoleState([folder], ConsoleAccess())
        sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{sock.getsockname()[1]}/api"
        self._server = uvicorn.Server(uvicorn.Config(build_app(self.state), lifespan="off", log_config=None))
        self._thread = Thread(target=self._server.run, kwargs={"sockets": [sock]})
        self._thread.start()

    def write(self, name, *records):
        """Append records to a run, which may be new."""
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        with (self.folder / name / "metrics.jsonl").open("a") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))

    def run(self, name="run"):
        """Return a run as its page asks for it."""
        ids = {row["name"]: row["id"] for row in self._asked("/runs")["runs"]}
        return self._asked(f"/runs/{ids[name]}")

    @contextmanager
    def followed(self, **query):
        """Yield the events of a stream: kind and data."""
        with urlopen(f"{self.address}/stream?{urlencode(query)}", timeout=60) as response:
            yield events_of(response)

    def _asked(self, path):
        with urlopen(self.address + path, timeout=60) as response:
            return json.load(response)

    def close(self):
        self.state.end()
        self._server.should_exit = True
        self._thread.join()
        self.state.close()


def events_of(lines):
    kind = ""
    for line in lines:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "event":
            kind = value
        elif name == "data":
            yield kind, json.loads(value)
        elif not name and value:
            yield "comment", value


def take_until(events, is_last):
    """Yield events up to one whose data is the last that was awaited; a file may be seen before its lines."""
    num_quiet = 0
    for kind, data in events:
        if kind == "comment":
            num_quiet += 1
            assert num_quiet < 5, "hundreds of looks found nothing"
            continue
        yield kind, data
        if is_last(data):
            return


@pytest.fixture
def console(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stream, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(discover, "_AGAIN_S", 0.0)
    (tmp_path / "runs").mkdir()
    served = ServedConsole(tmp_path / "runs")
    yield served
    served.close()


def steps(first, last, **values):
    return [{"step": n, "loss": 9.0 - n / 100, "tokens": 10 * n, **values} for n in range(first, last + 1)]


def test_the_table_is_sent_the_rows_that_changed_the_new_ones_and_the_deleted_ones(console):
    for name in ("left", "right"):
        console.write(name, *steps(1, 3))
    left, right = console.run("left")["id"], console.run("right")["id"]
    with console.followed() as events:
        assert next(events) == ("comment", "connected")
        assert next(events) == STILL_HERE, "after its first look, which sends nothing"
        console.write("right", *steps(4, 4))
        kind, row = next(events)
        assert (kind, row["id"], row["step"]) == ("row", right, 4)
        console.write("new", *steps(1, 2))
        (new,) = {data["name"] for kind, data in take_until(events, lambda row: row.get("step") == 2)}
        assert new == "new"
        shutil.rmtree(console.folder / "left")
        assert next(events) == ("gone", {"id": left})
        assert next(events) == STILL_HERE


def test_a_page_is_told_what_became_of_its_runs_while_it_was_not_connected(console):
    console.write("run", *steps(1, 3))
    run_id = console.run()["id"]
    with console.followed(runs=f"{run_id},0123456789abcdef") as events:
        assert next(events) == ("comment", "connected")
        assert next(events) == ("gone", {"id": "0123456789abcdef"})
        kind, row = next(events)
        assert (kind, row["step"]) == ("row", 3)


def test_a_quiet_stream_is_kept_alive_and_ends_with_the_console(console):
    console.write("run", *steps(1, 3))
    with console.followed() as events:
        assert [next(events) for _ in range(3)] == [("comment", "connected"), STILL_HERE, STILL_HERE]
        console.state.end()
        assert set(events) <= {STILL_HERE}
