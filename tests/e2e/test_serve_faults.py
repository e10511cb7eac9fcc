"""A real server under clients that leave, wait, lie and flood: it answers others, and keeps nothing of it."""

import asyncio
import json
import os
import random
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from penstock.core import env
from tests.serving import PATIENCE_S, end, make_model, serving

CONTEXT = 512
BOMB = """\
{%- for message in messages %}{{ message.content }}{% if message.content == 'bomb' %}
{%- for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{% endfor %}"""
STREAM = {"prompt": "the penstock", "temperature": 0, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Run a server whose cache has room for eight long answers, of sixty-four that may run."""
    env.raise_descriptor_limit()
    folder = make_model(tmp_path_factory.mktemp("served") / "tiny", template=BOMB, context=CONTEXT)
    with serving(folder, "--cache-gib", "0.001", "--max-sequences", "64") as running:
        with running.http() as http:
            assert say(http, "the turbine").status_code == 200  # the process of templates runs from here on
        yield running
        assert end(running) == 0
        assert "Traceback" not in running.errors.read_text()


@pytest.fixture(autouse=True)
def keeps_nothing(server):
    """Hold every test to this: the server has no block, no answer and no descriptor more, and it answers."""
    ask(server)
    before = Holds(server)
    yield
    for _ in range(3_000):  # each look is a request, so this waits without sleeping
        if (now := Holds(server)).are_no_more_than(before):
            break
    assert now.are_no_more_than(before), (now.__dict__, before.__dict__)
    assert ask(server)
    assert server.process.poll() is None


class Holds:
    """What a server's process has open."""

    def __init__(self, server):
        process = Path(f"/proc/{server.process.pid}")
        self.blocks = server.metric("penstock_cache_blocks_used")
        self.answers = server.metric("penstock_answers_running") + server.metric("penstock_answers_waiting")
        self.descriptors = len(list((process / "fd").iterdir()))
        self.threads = len(list((process / "task").iterdir()))

    def are_no_more_than(self, before):
        pool = min(32, (os.cpu_count() or 1) + 4)  # threads that asyncio starts as they are needed, and keeps
        return (
            self.blocks == self.answers == 0
            and self.descriptors <= before.descriptors
            and self.threads <= before.threads + pool
        )


def ask(server, **more):
    """Return the text of an answer."""
    with server.http() as http:
        reply = http.post("/v1/completions", json={**STREAM, "max_tokens": 8, "stream": False, **more})
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]


def say(http, word):
    body = {"messages": [{"role": "user", "content": word}], "max_tokens": 2}
    return http.post("/v1/chat/completions", json=body)


def post(body, *, path="/v1/completions", length=None):
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    return f"{head}{len(body) if length is None else length}\r\n\r\n".encode() + body


def connected(server):
    return socket.create_connection(("127.0.0.1", server.started["port"]), timeout=PATIENCE_S)


async def stream(server, body, *, leave_after):
    """Read a stream up to so many events, or all of it; return its text, or None if we left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.started["port"])
    try:
        writer.write(post(json.dumps(body).encode()))
        texts = []
        while line := await reader.readline():
            if line.startswith(b"data: [DONE]"):
                return "".join(texts)
            if line.startswith(b"data: "):
                texts.append(json.loads(line[6:])["choices"][0]["text"])
            if leave_after is not None and len(texts) >= leave_after:
                return None
        raise AssertionError("the server closed a stream before its end")
    finally:
        writer.close()


def test_a_thousand_streams_of_which_most_are_left(server):
    rng = random.Random(0)
    leaves = [None if rng.random() < 0.3 else rng.randrange(0, 12) for _ in range(1000)]
    expected = ask(server, max_tokens=16)

    async def all_at_once():
        body = {**STREAM, "max_tokens": 16}
        return await asyncio.gather(*(stream(server, body, leave_after=leave) for leave in leaves))

    found = asyncio.run(asyncio.wait_for(all_at_once(), PATIENCE_S * 2))
    assert found == [expected if leave is None else None for leave in leaves]


def test_answers_that_crowd_each_other_out_are_those_of_an_empty_server(server):
    prompts = [f"the turbine {n}" for n in range(40)]
    expected = [ask(server, prompt=prompt, max_tokens=200) for prompt in prompts[:4]]
    before = server.metric("penstock_preemptions_total")

    async def all_at_once():
        bodies = [{**STREAM, "prompt": prompt, "max_tokens": 200} for prompt in prompts]
        return await asyncio.gather(*(stream(server, body, leave_after=None) for body in bodies))

    found = asyncio.run(asyncio.wait_for(all_at_once(), PATIENCE_S * 2))
    assert found[:4] == expected
    assert server.metric("penstock_preemptions_total") > before


def test_a_prompt_longer_than_the_context_is_400(server):
    with server.http() as http:
        reply = http.post("/v1/completions", json={"prompt": "the turbine " * 100_000})
    assert reply.status_code == 400
    assert "context" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b"\x00" * 1000,
        b"[" * 200_000,
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": {"__class__": "os"}}',
        b'"prompt"',
        b"null",
        b"",
    ],
    ids=["utf8", "surrogate", "nul", "deep", "long number", "infinite", "object", "text", "null", "empty"],
)
def test_a_body_that_is_no_request_is_400_in_words(server, body):
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"):
            reply = http.post(path, content=body, headers={"Content-Type": "application/json"})
            assert reply.status_code == 400
            assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # TLS says hello
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\r\n\r\n\r\n" * 1000,
    ],
    ids=["tls", "version", "negative", "two lengths", "chunks", "lines"],
)
def test_bytes_that_are_not_http_are_refused_or_dropped(server, content):
    with connected(server) as sock:
        sock.sendall(content)
        sock.shutdown(socket.SHUT_WR)
        reply = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert reply == b"" or reply.startswith(b"HTTP/1.1 400 "), reply[:300]


def test_a_client_that_would_rather_speak_http_2_is_answered(server):
    asked = b'{"prompt": "a", "max_tokens": 1}'
    wish = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAA\r\nUpgrade: h2c\r\n"
    with connected(server) as sock:
        for _ in range(2):  # also on a connection that was used before
            sock.sendall(post(asked).replace(b"\r\n", b"\r\n" + wish, 1))
            reply = b""
            while not reply.endswith(b"}}}"):  # the end of the usage
                part = sock.recv(1 << 16)
                assert part, reply
                reply += part
            assert reply.startswith(b"HTTP/1.1 200 "), reply


@pytest.mark.parametrize("beyond", [5, 2], ids=["in the body", "in the mark between head and body"])
def test_nothing_is_left_out_of_a_body_that_looks_like_that_wish(server, beyond):
    """Else the next request on the connection, which may be another client's, would lose its beginning."""
    request = post(b"{\r\nUpgrade: h2c\r\n\r\n}").replace(b"\r\n", b"\r\nOrigin: https://evil.example\r\n", 1)
    at = request.index(b"\r\n\r\n") + beyond
    with connected(server) as sock, server.http() as http:
        sock.sendall(request[:at])
        assert http.get("/health").status_code == 200  # by now it has read that
        sock.sendall(request[at:])
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        reply = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert reply.startswith(b"HTTP/1.1 403 ")  # at once, for its origin, whatever its body is
    assert b"HTTP/1.1 200 OK" in reply, reply


def test_bodies_that_are_too_large_are_413_before_they_are_read(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connected(server) as sock:
        sock.sendall(post(b"", length=10**10))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    with connected(server) as sock:
        sock.sendall(head)
        chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        try:
            for _ in range(100):
                sock.sendall(chunk)
        except (BrokenPipeError, ConnectionResetError):
            return  # it did not read them all, and has closed
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_template_without_end_fails_its_own_request_only(server):
    with server.http() as http:
        reply = say(http, "bomb")
        assert reply.status_code == 500
        assert "template took more than" in reply.json()["error"]["message"]
        assert say(http, "the turbine").status_code == 200


def test_clients_that_send_slowly_hold_nobody_up(server):
    heads = [b"", b"POST /v1/comp", post(b"", length=100) + b"{", b"GET / HTTP/1.1\r\nHost: "]
    with ExitStack() as stack:
        for at in range(400):  # that they are closed in the end is in test_serve_door.py
            stack.enter_context(connected(server)).sendall(heads[at % len(heads)])
        assert ask(server)


def test_a_client_that_asks_twice_at_once_and_leaves_is_missed_by_both(server):
    body = post(json.dumps({**STREAM, "max_tokens": CONTEXT - 20, "n": 16}).encode())
    with connected(server) as sock:
        sock.sendall(body * 2)
        assert sock.recv(1)


def test_a_reader_that_stops_reading_holds_nobody_up(server):
    with connected(server) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(post(json.dumps({**STREAM, "max_tokens": CONTEXT - 20, "n": 16}).encode()))
        assert sock.recv(1)
        for _ in range(5):
            assert ask(server)
