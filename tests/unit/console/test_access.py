"""Who may ask the console: hosts, origins, keys, and what no client can reach."""

import json
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from penstock.console.access import ConsoleAccess, cookie_name
from penstock.console.app import ROUTERS, build_app
from penstock.console.state import ConsoleState
from penstock.core import clock
from penstock.core.api_keys import single_key
from penstock.core.files import exclusive
from penstock.launch.job_folder import JobFolder
from penstock.train.control import send
from penstock.train.control.requests import ControlRequest, open_requests, read_request
from tests.console_workers import answer_here

HOST = "127.0.0.1:8400"
OWN = {"origin": f"http://{HOST}"}
KEY = "a-key-of-some-length"
HTML = "<img src=x onerror=alert(1)>"


@pytest.fixture
def run(tmp_path, monkeypatch):
    answer_here(monkeypatch)
    folder = tmp_path / "runs" / HTML
    folder.mkdir(parents=True)
    records = [{"event": "start", "step": 0, "ranks": 1, "time": HTML}]
    records += [{"step": n, "loss": 3.0, "corpus_tokens": {HTML: n}} for n in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(
        json.dumps({"run": {"steps": 9, "note": HTML}, "optim": {"peak": 0.1}})
    )
    return folder


@contextmanager
def client(run, **rules):
    state = ConsoleState([run.parent], ConsoleAccess(**rules))
    with TestClient(build_app(state), base_url=f"http://{HOST}", follow_redirects=False) as asked:
        yield asked
    state.close()


def id_of(asked):
    return asked.get("/api/runs").json()["runs"][0]["id"]


def addresses(run_id):
    for router in ROUTERS:
        for route in router.routes:
            for method in route.methods - {"HEAD"}:
                yield method, route.path.replace("{run_id}", run_id).replace("{step}", "1")


@pytest.mark.parametrize(
    ("host", "name", "is_own"),
    [
        ("127.0.0.1", "127.0.0.1:8400", True),
        ("127.0.0.1", "LOCALHOST:9", True),
        ("127.0.0.1", "[::1]:8400", True),
        ("127.0.0.1", "evil.example:8400", False),  # its name points at 127.0.0.1 by now
        ("127.0.0.1", "127.0.0.1.evil.example", False),
        ("127.0.0.1", "10.0.0.7:8400", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[::1", False),
        ("head-node", "head-node:8400", True),
        ("head-node", "evil.example", False),
        ("0.0.0.0", "10.0.0.7:8400", True),
        ("0.0.0.0", "trainer:8400", True),
        ("0.0.0.0", "evil.example", False),
    ],
)
def test_only_names_of_this_machine_are_served(host, name, is_own):
    assert ConsoleAccess(host=host, names=frozenset({"trainer"})).is_own_host(name) is is_own


def test_no_route_answers_a_rebound_name_or_another_origin(run):
    with client(run, control=True) as asked:
        for method, address in addresses(id_of(asked)):
            rebound = asked.request(method, address, headers={"host": "evil.example", **OWN})
            assert (rebound.status_code, "not 'evil.example'" in rebound.text) == (403, True)
            for origin in ({}, {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://["}):
                if method == "POST":
                    posted = asked.post(address, json={}, headers=origin)
                    assert (posted.status_code, "Origin" in posted.text) == (403, True)
            if method == "POST":
                form = asked.post(address, data={"kind": "stop"}, headers=OWN)
                assert form.status_code == 415
    assert open_requests(run) == []


@pytest.mark.parametrize("second", [HOST, "evil.example"])
def test_a_request_with_two_names_is_refused(run, second):
    with client(run) as asked:
        assert asked.get("/api/runs", headers=[("host", HOST), ("host", second)]).status_code == 400


def test_every_answer_forbids_pages_to_fetch_from_elsewhere(run):
    with client(run) as asked:
        for address in ("/", "/api/runs", "/nothing/here", "/api/runs/unknown"):
            headers = asked.get(address).headers
            assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers


def test_a_console_without_control_sends_no_request(run):
    with client(run) as asked:
        absent = asked.post("/api/runs/absent/requests", json={"stop": True}, headers=OWN)
        assert absent.status_code == 404, "the run is looked up before the right to send is checked"
        found = asked.post(f"/api/runs/{id_of(asked)}/requests", json={"stop": True}, headers=OWN)
        assert found.status_code == 403
        assert "--control" in found.json()["error"]
        assert not asked.get(f"/api/runs/{id_of(asked)}").json()["control"]
    assert open_requests(run) == []


def test_a_key_opens_every_route_and_nothing_else_does(run):
    with client(run, host="0.0.0.0", keys=single_key(KEY)) as asked:
        for method, address in addresses("0" * 16):
            assert asked.request(method, address, headers=OWN).status_code == 401
            forged = {**OWN, "cookie": f"{cookie_name(HOST)}=x"}
            assert asked.request(method, address, headers=forged).status_code == 401
        assert 'type="password"' in asked.get("/").text
        assert "alert" not in asked.get("/").text
        wrong = asked.post("/", data={"key": "a-key-of-no-client"}, headers=OWN)
        assert (wrong.status_code, 'role="alert"' in wrong.text) == (401, True)
        assert asked.post("/", data={"key": KEY}).status_code == 403, "a page of another origin"
        opened = asked.post("/", data={"key": KEY}, headers=OWN)
        cookie = opened.headers["set-cookie"]
        assert opened.status_code == 303
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert KEY not in cookie
        assert asked.get("/api/runs").status_code == 200
        asked.cookies.clear()
        assert asked.get("/api/runs", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_after_some_wrong_keys_the_next_wrong_ones_wait_and_a_right_one_does_not(run, monkeypatch):
    at = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: at[0])

    def sign_in(key):
        return asked.post("/", data={"key": key}, headers=OWN)

    def bearer(key):
        return asked.get("/api/runs", headers={"authorization": f"Bearer {key}"})

    with client(run, host="0.0.0.0", keys=single_key(KEY)) as asked:
        signed_in = sign_in(KEY).headers["set-cookie"].partition(";")[0]
        asked.cookies.clear()
        assert [bearer("wrong").status_code for _ in range(3)] == [401] * 3
        assert [sign_in("wrong").status_code for _ in range(3)] == [401] * 3
        for wait_s in (1, 2, 4, 8, 16, 30, 30):
            for refused in (sign_in("wrong"), bearer("wrong")):
                assert refused.status_code == 429
                assert refused.headers["retry-after"] == str(wait_s)
                assert f"Try again in {wait_s} second" in refused.text
            assert asked.get("/api/runs", headers={"cookie": signed_in}).status_code == 200
            assert asked.get("/api/runs").status_code == 401, "who sends no key is told that one is needed"
            at[0] += wait_s
            assert sign_in("wrong").status_code == 401
        assert bearer("wrong").status_code == 429
        assert bearer(KEY).status_code == 200
        assert [bearer("wrong").status_code for _ in range(5)] == [401] * 5
        assert sign_in("wrong").status_code == 401
        assert sign_in(KEY).status_code == 303
        asked.cookies.clear()
        of_a_proxy = {"authorization": "Basic cHJveHk6cGFzc3dvcmQ="}
        assert [asked.get("/", headers=of_a_proxy).status_code for _ in range(9)] == [401] * 9
        assert [bearer("wrong").status_code for _ in range(5)] == [401] * 5, "a right key begins anew"
        assert bearer(KEY).status_code == 200


def test_a_proxy_with_tls_in_front_is_an_own_host_and_origin(run):
    proxied = {"host": "runs.example", "origin": "https://runs.example"}
    with client(run, keys=single_key(KEY), proxy_name="runs.example") as asked:
        assert asked.get("/", headers={"host": "evil.example"}).status_code == 403
        foreign = {**proxied, "origin": "https://evil.example"}
        assert asked.post("/", data={"key": KEY}, headers=foreign).status_code == 403
        opened = asked.post("/", data={"key": KEY}, headers=proxied)
        assert opened.status_code == 303
        assert "Secure" in opened.headers["set-cookie"]
        cookie = {"cookie": opened.headers["set-cookie"].partition(";")[0]}
        (row,) = asked.get("/api/runs", headers={**proxied, **cookie}).json()["runs"]
        told = asked.get(f"/api/runs/{row['id']}/checkpoints", headers={**proxied, **cookie}).json()
        assert "opens no models for other machines" in told["why_not"], "who reaches it is not on the machine"
        assert "Secure" not in asked.post("/", data={"key": KEY}, headers=OWN).headers["set-cookie"]


def test_two_consoles_of_one_host_leave_each_others_readers_signed_in(run):
    held = {}  # by a browser, of a host, whatever the port
    with client(run, keys=single_key(KEY)) as one, client(run, keys=single_key(KEY)) as other:
        other.base_url = "http://127.0.0.1:8401"
        for asked in (one, other):
            origin = {"origin": str(asked.base_url).rstrip("/")}
            assert asked.post("/", data={"key": KEY}, headers=origin).status_code == 303
            held |= dict(asked.cookies)
            asked.cookies.clear()
        headers = {"cookie": "; ".join(f"{name}={value}" for name, value in held.items())}
        assert [asked.get("/api/runs", headers=headers).status_code for asked in (one, other)] == [200, 200]


@pytest.mark.parametrize(
    "name", ["..%2f..%2faccess.py", "%2e%2e", ".hidden", "index.html%00", "/etc/passwd", "access.py"]
)
def test_pages_are_the_files_of_their_folders_only(run, name):
    with client(run) as asked:
        assert asked.get(f"/page/{name}").status_code == 404


def test_names_with_html_are_text(run):
    with client(run) as asked:
        (row,) = asked.get("/api/runs").json()["runs"]
        found = asked.get(f"/api/runs/{row['id']}")
        assert (row["name"], row["started"]) == (HTML, HTML)
        assert found.headers["content-type"] == "application/json"
        assert any(metric["name"].endswith(f"/{HTML}") for metric in found.json()["metrics"])
        assert found.json()["recipe"]["run.note"] == HTML


def test_search_is_in_names_and_recipes(run):
    with client(run) as asked:
        for words, number in (("optim.peak=0.1", 1), ("ONERROR steps=9", 1), ("adamw", 0)):
            assert len(asked.get("/api/runs", params={"search": words}).json()["runs"]) == number


@pytest.mark.parametrize(
    ("query", "x", "loss"),
    [
        ({"metrics": "loss"}, [1, 2], [3.0, 3.0]),
        ({"metrics": "loss,unknown", "from": "2"}, [2], [3.0]),
        ({"metrics": "loss", "x": "time", "to": "-1"}, [], []),
    ],
)
def test_curves_have_one_axis_and_null_where_there_is_nothing(run, query, x, loss):
    with client(run) as asked:
        found = asked.get(f"/api/runs/{id_of(asked)}/curves", params=query).json()
        assert (found["x"], found["series"]["loss"], found["means"]) == (x, loss, {})
        assert set(found["series"].get("unknown", [None])) <= {None}


def test_a_request_of_the_console_is_the_file_of_the_command(run, monkeypatch):
    class Opened:
        loader = type("L", (), {"corpora": {"web": None, "code": None}})

    monkeypatch.setattr(send, "opened_run", lambda _: Opened)
    monkeypatch.setattr(send, "check_possible", lambda *_: None)
    monkeypatch.setattr(send, "recipe_of", lambda _: None)
    with client(run, control=True, keys=single_key(KEY)) as asked:
        headers = {**OWN, "authorization": f"Bearer {KEY}"}
        address = "/api/runs/{}/requests".format(
            asked.get("/api/runs", headers=headers).json()["runs"][0]["id"]
        )
        wanted = {"weights": {"web": 0.6}, "reason": "more web", "asked_by": "root"}
        assert asked.post(address, json=wanted, headers=headers).json() == {"number": 1, "running": False}
        wrong = asked.post(address, json={**wanted, "weights": {"wbe": 0.6}}, headers=headers)
        assert (wrong.status_code, "Did you mean 'web'" in wrong.text) == (400, True)
        assert asked.post(address, json={"stop": True}, headers=headers).status_code == 409, "no job runs"
        assert asked.post(address, json={"sotp": True}, headers=headers).status_code == 400
        found = asked.get(address, headers=headers).json()
        (listed,) = found["requests"]
        assert not found["running"]
        assert (listed["kind"], listed["text"], listed["reply"]) == ("mixture", "web 0.6", None)
    sent = read_request(run, 1)
    assert (sent.weights, sent.asked_by, sent.reason) == ({"web": 0.6}, "console: key", "more web")


def test_a_list_of_requests_tells_whether_a_job_is_there_to_reply(run):
    with client(run) as asked:
        address = f"/api/runs/{id_of(asked)}/requests"
        with exclusive(run, purpose="test"):
            assert asked.get(address).json() == {"requests": [], "running": True}
        assert asked.get(address).json() == {"requests": [], "running": False}


@pytest.mark.parametrize(
    "fields",
    [
        {"batch_size": 24, "reason": "noisy"},
        {"islands": 3},
        {"checkpoint": True},
        {"stop": True},
    ],
)
def test_every_kind_of_request_reaches_a_job_that_runs(run, monkeypatch, fields):
    monkeypatch.setattr(send, "recipe_of", lambda _: None)
    with client(run, control=True) as asked, exclusive(run, purpose="test"):
        found = asked.post(f"/api/runs/{id_of(asked)}/requests", json=fields, headers=OWN)
    assert (found.status_code, found.json()) == (200, {"number": 1, "running": True})
    assert read_request(run, 1) == ControlRequest(number=1, asked_by="console", **fields)


def test_a_run_between_two_starts_is_marked_and_the_page_told_so(run, monkeypatch):
    monkeypatch.setattr(send, "recipe_of", lambda _: None)
    folder = JobFolder(run)
    with client(run, control=True) as asked:
        address = f"/api/runs/{id_of(asked)}/requests"
        assert asked.post(address, json={"stop": True}, headers=OWN).status_code == 409
        folder.make()
        folder.mark_started("j1")
        assert "end before they train" in asked.post(address, json={"stop": True}, headers=OWN).json()["said"]
        assert asked.post(address, json={"checkpoint": True}, headers=OWN).status_code == 409
    assert folder.is_to_stop("j1")
    assert open_requests(run) == []


@pytest.mark.parametrize("keys", [None, single_key(KEY)], ids=["open", "with keys"])
def test_a_body_without_a_length_is_bounded_too(run, keys):
    read = 0

    def endless():
        nonlocal read
        while read < 64 << 20:
            read += 1 << 16
            yield b" " * (1 << 16)

    with client(run, control=True, keys=keys) as asked:
        path = "/" if keys else f"/api/runs/{id_of(asked)}/requests"
        found = asked.post(path, content=endless(), headers={**OWN, "content-type": "application/json"})
    assert found.status_code == 413
