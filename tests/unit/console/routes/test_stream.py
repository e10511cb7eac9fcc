"""The stream of events over HTTP: what a page is sent while the files of its runs change."""

import json
import shutil
import socket
from contextlib import contextmanager
from threading import Event, Thread
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import uvicorn

from penstock.console.access import ConsoleAccess
from penstock.console.app import build_app
from penstock.console.routes import stream
from penstock.console.state import ConsoleState
from penstock.obs.run_data import discover
from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.run_files import LocalFiles

STILL_HERE = ("comment", "still here")


@pytest.fixture(autouse=True)
def generations_from_0(monkeypatch):
    monkeypatch.setattr("penstock.obs.run_data.columns.getrandbits", lambda _: 0)


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
        assert next(events) == ("reset", {}), "the page reads again what may have changed before this look"
        console.write("right", *steps(4, 4))
        kind, row = next(events)
        assert (kind, row["id"], row["step"]) == ("row", right, 4)
        console.write("new", *steps(1, 2))
        (new,) = {data["name"] for kind, data in take_until(events, lambda row: row.get("step") == 2)}
        assert new == "new"
        shutil.rmtree(console.folder / "left")
        found = list(take_until(events, lambda data: data == {"id": left}))
        assert found[-1] == ("gone", {"id": left})
        assert {data["id"] for _, data in found} == {left}, "a look may see half of a folder"
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
        found = [next(events) for _ in range(4)]
        assert found == [("comment", "connected"), ("reset", {}), STILL_HERE, STILL_HERE]
        console.state.end()
        assert set(events) <= {STILL_HERE}


def points_of(events, last_step):
    """Return the steps of points up to one; other events are left out."""
    found = take_until(events, lambda data: data.get("x", {}).get("step") == last_step)
    return [data["x"]["step"] for kind, data in found if kind == "points"]


def test_a_record_written_after_the_page_asked_is_sent_though_the_stream_begins_later(console):
    console.write("run", *steps(1, 3))
    page = console.run()
    console.write("run", *steps(4, 5))
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        assert points_of(events, 5) == [4, 5]
        console.write("run", *steps(6, 6))
        assert points_of(events, 6) == [6]


def test_a_point_has_its_place_on_every_axis_and_the_values_of_its_record(console):
    console.write("run", *steps(1, 2, step_s=2.0, device_hours=0.5))
    page = console.run()
    console.write("run", *steps(3, 3, step_s=2.0, device_hours=0.75, mfu=float("nan")))
    console.write("run", {"step": 3, "validation_loss": 2.5})
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        found = take_until(events, lambda data: "validation_loss" in data.get("values", ()))
        first, second = [data for kind, data in found if kind == "points"]
    assert first["x"] == {"step": 3, "tokens": 30, "time": 6, "money": 0}
    assert (first["values"]["loss"], first["values"]["mfu"]) == (8.97, None)
    assert (second["x"], second["values"]) == (first["x"], {"validation_loss": 2.5})


def reset_of(console, page):
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        found = list(take_until(events, lambda data: "generation" in data))
    assert "points" not in {kind for kind, _ in found}
    return found[-1]


def test_more_than_500_points_are_a_reset(console):
    console.write("run", *steps(1, 3))
    page = console.run()
    console.write("run", *steps(4, 504))
    assert reset_of(console, page) == ("reset", {"run": page["id"], "generation": 0})


def test_steps_that_go_back_are_a_reset_of_a_new_generation(console):
    console.write("run", *steps(1, 9))
    page = console.run()
    console.write("run", {"event": "start", "step": 4, "ranks": 1}, *steps(5, 5))
    assert reset_of(console, page) == ("reset", {"run": page["id"], "generation": 1})


@pytest.mark.parametrize("cursor", ["0.9.0.0.0.0", "-1.0.0.0.0.0", "0.-3.0.0.0.0", "0.3", "x", "9" * 5000])
def test_a_cursor_that_the_run_does_not_go_on_from_is_a_reset(console, cursor):
    console.write("run", *steps(1, 3))
    page = console.run()
    assert reset_of(console, {**page, "cursor": cursor})[0] == "reset"


def test_a_new_event_is_told_after_its_points(console):
    console.write("run", *steps(1, 3))
    page = console.run()
    console.write("run", *steps(4, 4), {"event": "skipped", "step": 4, "why": "loss is NaN"})
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        found = [kind for kind, _ in take_until(events, lambda data: data == {"run": page["id"]})]
    assert [kind for kind in found if kind != "row"] == ["points", "event"]


def test_a_new_loss_spike_is_an_event(console):
    console.write("run", *steps(1, 200))
    page = console.run()
    assert page["events"] == []
    console.write("run", *steps(201, 201), {"step": 202, "loss": 30.0}, *steps(203, 203))
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        found = [kind for kind, _ in take_until(events, lambda data: data == {"run": page["id"]})]
    assert [kind for kind in found if kind != "row"] == ["points", "points", "points", "event"]
    assert [(event["kind"], event["step"]) for event in console.run()["events"]] == [("spike", 202)]


def test_new_sample_answers_are_told(console):
    console.write("run", *steps(1, 3), {"event": "samples", "step": 0, "answers": []})
    page = console.run()
    console.write("run", {"event": "samples", "step": 3, "answers": []})
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        found = [kind for kind, _ in take_until(events, lambda data: data == {"run": page["id"]})]
    assert [kind for kind in found if kind != "row"] == ["samples"]


def test_several_runs_have_their_cursors_in_their_order(console):
    for name in ("a", "b"):
        console.write(name, *steps(1, 3))
    pages = [console.run(name) for name in ("a", "b")]
    console.write("b", *steps(4, 4))
    ids, cursors = (",".join(page[key] for page in pages) for key in ("id", "cursor"))
    with console.followed(runs=ids, since=cursors) as events:
        found = list(take_until(events, lambda data: data.get("x", {}).get("step") == 4))
    assert {data["run"] for kind, data in found if kind == "points"} == {pages[1]["id"]}


def test_a_run_of_several_windows_is_sent_once_from_the_one_that_has_least(console):
    console.write("run", *steps(1, 3))
    first = console.run()
    console.write("run", *steps(4, 5))
    second = console.run()
    ids, cursors = (",".join(page[key] for page in (second, first, second)) for key in ("id", "cursor"))
    with console.followed(runs=ids, since=cursors) as events:
        assert points_of(events, 5) == [4, 5]
        console.write("run", *steps(6, 6))
        assert points_of(events, 6) == [6]


def test_a_stream_says_how_far_it_is_so_that_the_next_one_goes_on_from_there(console):
    console.write("run", *steps(1, 3))
    page = console.run()
    console.write("run", *steps(4, 5))
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        (at,) = [data for kind, data in take_until(events, lambda data: "cursor" in data) if kind == "at"]
    assert at == {"run": page["id"], "cursor": console.run()["cursor"]}
    console.write("run", *steps(6, 6))
    with console.followed(runs=page["id"], since=at["cursor"]) as events:
        assert points_of(events, 6) == [6]


def test_the_next_stream_after_a_reset_does_not_send_it_again(console):
    console.write("run", *steps(1, 9))
    page = console.run()
    console.write("run", {"event": "start", "step": 4, "ranks": 1}, *steps(5, 5))
    with console.followed(runs=page["id"], since=page["cursor"]) as events:
        *_, (_, at) = take_until(events, lambda data: "cursor" in data)
    with console.followed(runs=page["id"], since=at["cursor"]) as events:
        console.write("run", *steps(6, 6))
        found = [kind for kind, _ in take_until(events, lambda data: data.get("x", {}).get("step") == 6)]
    assert "reset" not in found


class SilentFiles(LocalFiles):
    """A run in an object store that does not answer until a test lets it."""

    is_stored = True

    def __init__(self, folder):
        super().__init__(folder)
        self.location, self.may_answer = "s3://silent/run", Event()

    def stamp(self, name):
        assert self.may_answer.wait(60)
        return super().stamp(name)

    seen = stamp


def test_a_store_that_does_not_answer_holds_up_no_points_of_other_runs(console, tmp_path, monkeypatch):
    console.write("run", {"step": 1, "loss": 3.0})
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "metrics.jsonl").write_text('{"step": 1, "loss": 4.0}\n')
    run, files = console.run(), SilentFiles(tmp_path / "away")
    own = console.state.folders.runs()
    monkeypatch.setattr(console.state.folders, "runs", lambda: [FoundRun("away", "away", files), *own])
    query = {"runs": f"away,{run['id']}", "since": f"0.0.0.0.0.0,{run['cursor']}"}
    try:
        with console.followed(**query) as events:
            console.write("run", {"step": 2, "loss": 2.5})
            shown = take_until(events, lambda data: data.get("run") == run["id"])
            assert next(data["values"]["loss"] for kind, data in shown if kind == "points") == 2.5
            files.may_answer.set()
            shown = take_until(events, lambda data: data.get("run") == "away")
            assert next(data["values"]["loss"] for kind, data in shown if kind == "points") == 4.0
    finally:
        files.may_answer.set()
