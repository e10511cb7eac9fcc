"""An HTTP server for tests: objects of a folder or of another server, with faults put in between.

Every request is counted. A fault is chosen by a function of the request, so a test says exactly what
goes wrong when; without one the server is a plain one with ranges and ETags.
"""

import hashlib
import http.client
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

_PASSED_ON = ("Content-Range", "ETag", "Last-Modified", "Accept-Ranges", "Content-Type", "Retry-After")


@dataclass(frozen=True)
class Request:
    index: int
    """Requests before this one, of any object."""
    attempt: int
    """Requests before this one for the same method, path and range."""
    method: str
    path: str
    range: str | None


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


Fault = str | Reply | None
"""`reset`, `truncate`, `stall`, `flip`, `short` (a shorter range than asked), a whole reply, or None."""


@lru_cache(maxsize=64)
def _content(path: Path, _modified_ns: int) -> tuple[bytes, str]:
    content = path.read_bytes()
    return content, f'"{hashlib.md5(content).hexdigest()}"'


class Traffic:
    """What went over the wire; changed under a lock."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._times: Counter[tuple[str, str, str | None]] = Counter()
        self.body_bytes = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()

    def of(self, suffix: str) -> list[Request]:
        return [request for request in self.requests if request.path.endswith(suffix)]

    def note(self, method: str, path: str, wanted: str | None) -> Request:
        with self.lock:
            same = method, path, wanted
            request = Request(len(self.requests), self._times[same], *same)
            self._times[same] += 1
            self.requests.append(request)
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return request

    def clear(self) -> None:
        self.requests.clear()
        self._times.clear()
        self.body_bytes = 0


class FaultyServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, origin: Path | str) -> None:
        self.origin = origin
        self.traffic = Traffic()
        self.fault: Callable[[Request], Fault] = lambda _request: None
        self.delay_s = 0.0
        self.etags = True
        self.released = threading.Event()
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: clients that hang up are what is tested."""


@contextmanager
def serving(origin: Path | str) -> Iterator[FaultyServer]:
    """Serve a folder, or pass on to a server (its URL), until the end of the block."""
    server = FaultyServer(origin)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
        for connection in list(server.connections):  # which clients keep for their next request
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: FaultyServer

    def setup(self) -> None:
        self.timeout = 30
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        with suppress(OSError):
            super().finish()

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        request = self.server.traffic.note(self.command, path, self.headers.get("Range"))
        self.server.released.wait(self.server.delay_s)
        fault = self.server.fault(request)
        # Before the answer goes out: the client may ask again before this thread runs again.
        with self.server.traffic.lock:
            self.server.traffic.in_flight -= 1
        if fault == "stall":
            self.server.released.wait(30)
            self._hang_up()
        elif fault == "reset":
            self._hang_up()
        elif isinstance(fault, Reply):
            self._send(fault)
        else:
            self._send(self._origin(shorter=fault == "short"), fault)

    do_HEAD = do_GET  # noqa: N815 - the name is the library's

    def _origin(self, *, shorter: bool) -> Reply:
        origin = self.server.origin
        if isinstance(origin, Path):
            return self._from_folder(origin, shorter=shorter)
        connection = http.client.HTTPConnection(urlsplit(origin).netloc, timeout=30)
        try:
            kept = {k: v for k, v in self.headers.items() if k.lower() not in ("connection",)}
            connection.request(self.command, self.path, headers=kept)
            answer = connection.getresponse()
            headers = {name: value for name in _PASSED_ON if (value := answer.getheader(name))}
            if self.command == "HEAD":
                headers["Content-Length"] = answer.getheader("Content-Length") or "0"
            return Reply(answer.status, answer.read(), headers)
        finally:
            connection.close()

    def _from_folder(self, folder: Path, *, shorter: bool) -> Reply:
        path = folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            return Reply(404, b"no such object")
        content, etag = _content(path, path.stat().st_mtime_ns)
        headers = {"Accept-Ranges": "bytes"}
        if self.server.etags:
            headers["ETag"] = etag
            if self.headers.get("If-Match", etag) != etag:
                return Reply(412, b"another object")
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = int(asked[1]), min(int(asked[2] or len(content)) + 1, len(content))
            stop -= (stop - start) // 2 if shorter else 0
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            return Reply(206, content[start:stop], headers)
        if self.command == "HEAD":
            headers["Content-Length"] = str(len(content))
        return Reply(200, content, headers)

    def _send(self, reply: Reply, fault: Fault = None) -> None:
        body = b"" if self.command == "HEAD" else reply.body
        if fault == "flip" and body:
            body = body[:-1] + bytes([body[-1] ^ 1])
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if "Content-Length" not in reply.headers:
            self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if fault == "truncate":
            self.wfile.write(body[: len(body) // 2])
            self._hang_up()
            return
        with self.server.traffic.lock:
            self.server.traffic.body_bytes += len(body)
        self.wfile.write(body)

    def _hang_up(self) -> None:
        """Reset the connection: no more bytes, no orderly end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.wfile.flush()
        self.connection.close()
