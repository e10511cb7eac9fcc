"""Who may ask a server, how much, and how it ends."""

import contextlib
import json
import re
import signal
import socket
import time

import openai
import pytest

from penstock.cli import main as command_line
from tests.in_process import run_cli
from tests.serving import PATIENCE_S, end, make_model, serving
from tests.tiny_models import panicking

ENDLESS = {"prompt": "the", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("door") / "tiny")


@contextlib.contextmanager
def streaming(http, **more):
    """A stream under way; yields its lines."""
    with http.stream("POST", "/v1/completions", json=ENDLESS | more) as reply:
        assert reply.status_code == 200
        lines = reply.iter_lines()
        next(lines)
        yield lines


def test_keys_limits_and_deadlines_hold(folder, tmp_path):
    keys = tmp_path / "keys.txt"
    keys.write_text("alice alices-secret-key\nbob bobs-secret-key-too\n")
    words = ("--api-keys", keys, "--max-open", 8, "--max-body-bytes", 2000, "--cache-gib", "0.05")
    with serving(folder, *words, "--max-output-tokens", 5000, "--cors", "https://Chat.example/") as server:
        with server.http() as http:
            assert http.get("/health").status_code == http.get("/ready").status_code == 200
            assert http.get("/metrics").status_code == http.get("/v1/models").status_code == 401
            denied = http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "Bearer x"})
            assert denied.json()["error"]["code"] == "invalid_api_key"
            assert denied.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError), server.openai("wrong") as client:
            client.models.list()
        with server.http() as http:
            http.headers["Authorization"] = "Bearer alices-secret-key"
            listed = http.get("/v1/models", headers={"X-Request-Id": "gw-7"})
            assert (listed.status_code, listed.headers["x-request-id"]) == (200, "gw-7")
            large = http.post("/v1/completions", json={"prompt": "a" * 3000})
            assert (large.status_code, "2,000 bytes" in large.text) == (413, True)
            page = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
            page["Access-Control-Request-Headers"] = (
                "authorization, x-stainless-os"  # OpenAI's client for browsers
            )
            page["Access-Control-Request-Private-Network"] = "true"
            allowed = http.options("/v1/completions", headers=page)
            assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (
                200,
                page["Origin"],
            )
            evil = http.get("/v1/models", headers={"Origin": "https://evil.example"})
            assert evil.status_code == 403
            overload(http)
        assert end(server) == 0
        assert "secret" not in server.errors.read_text()


def overload(http):
    with streaming(http, n=8):
        refused = http.post("/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert http.get("/health").status_code == 200
    for _ in range(10_000):  # its blocks are free, so there is room
        if http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200:
            return
    raise AssertionError("there never was room again")


def test_sigterm_lets_answers_end_and_takes_no_more(folder):
    with serving(folder, "--cache-gib", "0.05", "--drain-s", PATIENCE_S) as server, server.http() as http:
        with streaming(http, max_tokens=3000) as lines:
            server.process.send_signal(signal.SIGTERM)
            while http.get("/ready").status_code == 200:
                continue
            assert http.get("/ready").json() == {"status": "draining", "reason": None}
            assert http.get("/health").status_code == 200
            refused = http.post("/v1/completions", json={"prompt": "a"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(PATIENCE_S) == 0


def test_a_body_on_its_way_when_the_server_ends_is_refused_at_once(folder):
    with serving(folder, "--cache-gib", "0.05", "--drain-s", PATIENCE_S) as server, server.http() as http:
        with socket.create_connection(("127.0.0.1", server.started["port"]), timeout=PATIENCE_S) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
            assert http.get("/health").status_code == 200  # the server has read what came before
            server.process.send_signal(signal.SIGTERM)
            assert half.makefile("rb").readline().startswith(b"HTTP/1.1 503")
        assert server.process.wait(PATIENCE_S) == 0
        assert "Traceback" not in server.errors.read_text()


def test_what_does_not_end_in_time_is_cancelled(folder):
    with serving(folder, "--cache-gib", "0.05", "--drain-s", "0.2") as server, server.http() as http:
        with streaming(http, n=8) as lines:
            server.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "cancelled"
        assert server.process.wait(PATIENCE_S) == 0


def test_a_server_that_nobody_asks_ends_by_itself_after_its_time(folder):
    with serving(folder, "--idle-s", 0.5, "--cache-gib", "0.05", "--drain-s", 5) as running:
        with running.http() as http:
            assert http.get("/health").status_code == 200
        assert running.process.wait(PATIENCE_S) == 0


def test_a_model_has_no_checkpoint_of_a_step(folder):
    done = run_cli("serve", folder, "--checkpoint", 3)
    assert (
        done.returncode,
        "has no checkpoints: it is a model (got 3)" in " ".join(done.stderr.split()),
    ) == (2, True)


def test_a_second_signal_ends_at_once(folder):
    with serving(folder, "--cache-gib", "0.05", "--drain-s", "600") as server, server.http() as http:
        with streaming(http, n=8):
            server.process.send_signal(signal.SIGTERM)
            while http.get("/ready").status_code == 200:
                continue
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(PATIENCE_S) == 1
        assert "second signal came" in server.errors.read_text()


@pytest.fixture(scope="module")
def hasty(folder):
    """A server with little patience."""
    with serving(folder, "--deadline-s", "0.5", "--cache-gib", "0.05") as server:
        yield server


def test_an_answer_that_takes_too_long_is_ended(hasty):
    with hasty.http() as http:
        late = http.post("/v1/completions", json=ENDLESS | {"stream": False, "n": 8})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline")
        with http.stream("POST", "/v1/completions", json=ENDLESS | {"n": 8}) as reply:
            events = [line for line in reply.iter_lines() if line]  # perhaps only these two
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "deadline"
        assert events[-1] == "data: [DONE]"
        assert hasty.metric("penstock_cache_blocks_used") == 0


def test_clients_that_send_half_a_request_keep_nobody_waiting(hasty):
    address = ("127.0.0.1", hasty.started["port"])
    with contextlib.ExitStack() as stack, hasty.http() as http:
        for _ in range(50):
            slow = stack.enter_context(socket.create_connection(address))
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n")
        assert http.get("/health").status_code == 200


def test_headers_without_end_are_not_kept(hasty):
    with socket.create_connection(("127.0.0.1", hasty.started["port"]), timeout=PATIENCE_S) as endless:
        endless.sendall(b"GET / HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):  # the server closes while this still sends
            for _ in range(64):
                endless.sendall(b"x" * 65_536)
            assert endless.makefile("rb").read().startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(("pieces", "pause"), [(1, 0.0), (40, 0.0), (70, 0.002)])
@pytest.mark.parametrize("in_address", [True, False])
def test_a_head_that_is_too_large_is_431_however_it_is_cut(hasty, in_address, pieces, pause):
    padding = b"x" * 70_000
    head = b"GET /health?%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % padding
    if not in_address:
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: %b\r\nB: %b\r\n\r\n" % (
            padding[:40_000],
            padding[:30_000],
        )
    step = -(-len(head) // pieces)
    with socket.create_connection(("127.0.0.1", hasty.started["port"]), timeout=PATIENCE_S) as large:
        large.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin in range(0, len(head), step):
            large.sendall(head[begin : begin + step])
            time.sleep(pause)
        said = large.makefile("rb").read()
    assert said.startswith(b"HTTP/1.1 431 ")
    assert "65,536 bytes" in json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]
    with hasty.http() as http:
        assert http.get("/health", headers={"A": "x" * 60_000}).status_code == 200


def test_a_tokenizer_that_panics_fails_that_request_alone(tmp_path):
    folder = make_model(tmp_path / "tiny")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(panicking(tokenizer.read_bytes()))
    with serving(folder, "--cache-gib", "0.05") as server, server.http() as http:
        for route, body in (
            ("/v1/completions", {"prompt": "caf\u00e9"}),
            ("/v1/completions", {"prompt": "caf\u00e9", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\u6c34" * 2000}]}),
            ("/v1/embeddings", {"input": ["a", "\u6c34"]}),
            ("/tokenize", {"prompt": "\u00e9"}),
        ):
            failed = http.post(route, json=body)
            assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error"), route
            assert "tokenizer fails on this text" in failed.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "cafe", "max_tokens": 2}).status_code == 200
        assert end(server) == 0


def test_without_its_packages_serving_says_which(monkeypatch, capsys):
    monkeypatch.setattr("penstock.cli.serve.find_spec", lambda name: None if name == "uvicorn" else name)
    assert command_line.main(["serve", "nowhere"]) == 2
    assert "not installed: uvicorn. Install them with" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def started(folder, monkeypatch, capsys):
    """What `penstock serve` would serve with these words, and what it prints."""

    def start(*words):
        services = []

        def run(_app, service, *, on_started, **_):
            services.append(service)
            on_started()

        monkeypatch.setattr("penstock.serve.server.run", run)
        assert command_line.main(["serve", str(folder), "--port", "0", "--json", *words]) == 0
        return services[0], json.loads(capsys.readouterr().out)

    return start


@pytest.mark.parametrize(("words", "expected"), [([], (0.3, 7, 1.0)), (["--api-sampling"], (1.0, None, 1.0))])
def test_the_apis_sampling_can_be_had_instead_of_the_models(folder, started, words, expected):
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 7}')
    try:
        service, printed = started(*words)
    finally:
        (folder / "generation_config.json").unlink()
    assert (printed["temperature"], printed["top_k"], printed["top_p"]) == expected
    sampling = service.served.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected


@pytest.mark.parametrize(("words", "is_token"), [([], False), (["--trust-contents"], True)])
def test_contents_are_trusted_where_the_command_line_says_so(started, words, is_token):
    service, _ = started(*words)
    encoded = service.served.text_processor.encode_chat([{"role": "user", "content": "<|endoftext|>"}])
    assert (0 in encoded) == is_token


def test_an_address_of_another_machine_is_not_a_matter_of_the_port(folder, capsys):
    assert command_line.main(["serve", str(folder), "--host", "192.0.2.1", "--insecure", "--port", "0"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Cannot listen on 192.0.2.1:0: Cannot assign requested address. Give an address of this" in said


def test_ports_that_are_taken_are_wrong_usage(folder, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert command_line.main(["serve", str(folder), "--port", str(port)]) == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "there is no API key"),
        (["--api-keys", "absent"], 2, "key file absent cannot be read"),
        (["--adapter", "x"], 2, "--adapter is NAME=FOLDER"),
        (["--name", "x", "--adapter", "x=y"], 2, "a name that neither the model has"),
        (["--max-open", "0"], 2, "max_open must be positive"),
        (["--host", "no.such.host.invalid", "--insecure"], 2, "No address no.such.host.invalid"),
        (["--port", "99999"], 2, "a port is from 0 to 65,535"),
        (["--cors", "chat.example.com"], 2, "--cors is no origin of web pages (got 'chat.example.com')"),
        (["--cors", "https://chat.example.com/page"], 2, "such as https://chat.example.com"),
    ],
)
def test_wrong_words_are_one_paragraph_before_a_model_is_loaded(words, code, message, capsys, monkeypatch):
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    assert command_line.main(["serve", "nowhere", *words]) == code
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert re.match(r"penstock: |\S+Z Error: ", shown), "a line of the log, once that is open"
