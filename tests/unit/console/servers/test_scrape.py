"""Addresses of servers, their keys, and pages that are not theirs."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.console.servers import scrape as scrape_module
from penstock.console.servers.scrape import Server, read_server_keys, reading_of, scrape, server_of
from penstock.core.errors import PenstockError, UsageError
from penstock.engine.stats import EngineCounters, Stats
from penstock.serve.metrics import Metrics


def page():
    """The page of a server, made by what makes it."""
    counts = EngineCounters(sampled=40, drafts=10, drafts_accepted=6)
    stats = Stats(
        waiting=2, running=3, num_blocks=8, used_blocks=2, preemptions=0, prefix_asked=0, prefix_found=0,
        counts=counts,
    )  # fmt: skip
    metrics = Metrics(lambda: stats)
    for seconds in (0.02, 0.2, 0.2):
        metrics.first_token(seconds)
    return metrics.text()


@contextmanager
def serving(content, *, status=200, headers=()):
    """Yield (address, headers of the requests) of a server with one page."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, self.headers.get("authorization")))
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", seen
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("text", "name", "url"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/metrics", "127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("big=https://model.example/chat/", "big", "https://model.example/chat"),
        ("http://h/a=b", "h", "http://h/a=b"),
    ],
)
def test_a_server_is_named_by_its_address_or_by_the_user(text, name, url):
    assert server_of(text, {}) == Server(name=name, url=url)


@pytest.mark.parametrize(
    "text",
    ["", "127.0.0.1:8000", "file:///etc/passwd", "x=ftp://h", "http://", "http://h:x", "http://u:p@h", "http://["],
)  # fmt: skip
def test_what_is_no_address_of_a_server_is_refused(text):
    with pytest.raises(UsageError, match="takes the address of a server"):
        server_of(text, {})


def test_keys_are_by_name_and_a_wrong_line_is_not_repeated():
    keys = read_server_keys("big secret-1  # ours\n\nsmall secret-2\n", where="keys.txt")
    assert keys == {"big": "secret-1", "small": "secret-2"}
    assert server_of("big=http://h", keys, default_key="other").key == "secret-1"
    assert server_of("http://h", keys, default_key="other").key == "other"
    with pytest.raises(UsageError, match="line 1") as raised:
        read_server_keys("just-a-secret", where="keys.txt")
    assert "secret" not in str(raised.value)


def test_the_page_of_a_server_is_read_with_its_key():
    with serving(page()) as (address, seen):
        reading = scrape(Server(name="s", url=address, key="a-key"))
    assert seen == [("/metrics", "Bearer a-key")]
    assert reading.values["penstock_answers_running"] == 3
    assert reading.values["penstock_answer_tokens_total"] == 40
    buckets = dict(reading.histograms["penstock_time_to_first_token_seconds"])
    assert (buckets[0.01], buckets[0.025], buckets[float("inf")]) == (0, 1, 3)


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"<html>hello</html>", 200, "not the page of a Penstock server"),
        (b"# TYPE other gauge\nother 1\n", 200, "not the page of a Penstock server"),
        (b"\xff\x00{", 200, "not the page of a Penstock server"),
        (b"", 404, "status 404"),
        (b"", 401, "wants a key"),
        (b"x" * (4 * 2**20 + 1), 200, "more than 4,194,304 bytes"),
    ],
)
def test_another_page_is_one_sentence(content, status, said):
    with serving(content, status=status) as (address, _), pytest.raises(PenstockError, match=said):
        scrape(Server(name="s", url=address))


def test_a_redirection_is_not_followed():
    with (
        serving(page()) as (elsewhere, seen),
        serving(b"", status=302, headers=[("location", f"{elsewhere}/metrics")]) as (address, _),
        pytest.raises(PenstockError, match="status 302"),
    ):
        scrape(Server(name="s", url=address))
    assert seen == []


def test_a_server_that_is_not_there_is_one_sentence():
    with serving(b"") as (address, _):
        pass
    with pytest.raises(PenstockError, match="does not answer"):
        scrape(Server(name="s", url=address))


@pytest.mark.parametrize(
    "begin", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
)
def test_a_server_that_sends_a_byte_now_and_then_is_left_after_a_while(begin, monkeypatch):
    monkeypatch.setattr(scrape_module, "TIMEOUT_S", 0.3)
    is_left = Event()

    def drip(listener):
        sock, _ = listener.accept()
        with sock, suppress(OSError):
            sock.sendall(begin)
            for _ in range(20_000):
                sock.sendall(b"1")
                if is_left.wait(0.01):
                    return
            pytest.fail("the scrape read on")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        dripping = pool.submit(drip, listener)
        with pytest.raises(PenstockError, match=r"does not answer: (timed out|no whole answer)"):
            scrape(Server(name="s", url=f"http://127.0.0.1:{listener.getsockname()[1]}"))
        is_left.set()
        dripping.result(timeout=60)


@pytest.mark.parametrize("host", ["a..b", f"{'x' * 70}.example"])
def test_a_name_that_no_server_can_have_is_one_sentence(host):
    with pytest.raises(PenstockError, match="does not answer"):
        scrape(Server(name="s", url=f"http://{host}"))


@given(
    st.text(alphabet=st.sampled_from('a_{}="\\,0123456789.eE+-#\n TYPEgaugecounter'), max_size=80) | st.text()
)
def test_any_text_is_read_without_a_traceback(text):
    reading = reading_of(text)
    assert all(value == value for value in reading.values.values())
