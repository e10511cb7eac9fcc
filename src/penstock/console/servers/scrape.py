"""One reading of a server's /metrics page: fetched with bounds, and what is drawn of it."""

import http.client
import io
import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError

TIMEOUT_S = 3.0
"""Seconds for a whole answer: a server that sends a byte now and then holds no thread for longer."""
_MOST_BYTES = 4 * 2**20
_OURS = "penstock_answers_running"
"""Metric that every server of Penstock has."""

Buckets = tuple[tuple[float, float], ...]
"""(upper edge, number of observations up to it), ascending; the last edge is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server of the command line; no other is ever asked."""

    name: str
    url: str
    """http or https, without a path: `/metrics` is added to what there is."""
    key: str = ""
    """API key; empty: none is sent."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of one page; counters and histograms count from the server's start."""

    values: Mapping[str, float]
    """Metric -> value, summed over its labels."""
    histograms: Mapping[str, Buckets]


def server_of(text: str, keys: Mapping[str, str], *, default_key: str = "") -> Server:
    """Return the server that an option names: URL, or NAME=URL.

    Raises:
        UsageError: it is no http address.

    >>> server_of("chat=http://127.0.0.1:8000/", {}).name
    'chat'
    """
    name, sign, url = text.partition("=")
    if not sign or "://" in name:
        name, url = "", text
    try:
        parts = urlsplit(url)
        is_known = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:
        is_known = False
    if not is_known or parts.query or parts.fragment or parts.username is not None:
        raise UsageError(
            "--server takes the address of a server", got=text, fix="Example: --server http://127.0.0.1:8000."
        )
    name = name or parts.netloc
    key = keys.get(name, default_key)
    if not key.isprintable() or not key.isascii():
        raise UsageError(f"The key of server {name} has characters that no header can send")
    path = parts.path.rstrip("/").removesuffix("/metrics")
    return Server(name=name, url=f"{parts.scheme}://{parts.netloc}{path}", key=key)


def read_server_keys(text: str, *, where: str) -> dict[str, str]:
    """Return server name -> key of a file with one `name key` a line; `#` starts a comment.

    Raises:
        UsageError: a line is something else; the message has no key.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words and len(words) != 2:
            raise UsageError(f"{where}, line {number}: not a name and a key", fix="Write `name key`.")
        if words:
            found[words[0]] = words[1]
    return found


def scrape(server: Server) -> Reading:
    """Ask a server for its metrics; redirections are not followed.

    Raises:
        PenstockError: it cannot be reached, or the page is not of a server of Penstock.
    """
    try:
        status, content = _fetched(server)
    except (OSError, http.client.HTTPException, UnicodeError) as error:  # of a name that no DNS has
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise PenstockError(
            f"{server.url} does not answer: {said}", fix="Start the server, or correct --server."
        ) from None
    if status in (401, 403):
        raise PenstockError(
            f"{server.url} wants a key", fix="Give it by PENSTOCK_API_KEY or --server-key-file."
        )
    if status != 200:
        raise PenstockError(
            f"{server.url}/metrics answers with status {status}", fix="Give the address of `penstock serve`."
        )
    if len(content) > _MOST_BYTES:
        raise PenstockError(
            f"{server.url}/metrics has more than {_MOST_BYTES:,} bytes",
            fix="Give the address of `penstock serve`.",
        )
    reading = reading_of(content.decode(errors="replace"))
    if _OURS not in reading.values:
        raise PenstockError(
            f"{server.url}/metrics is not the page of a Penstock server (it has no {_OURS})",
            fix="Give the address of `penstock serve`.",
        )
    return reading


def reading_of(text: str) -> Reading:
    """Return the values of a page in Prometheus' text format, or none if it is something else.

    >>> reading_of("# TYPE a counter\\na_total{k=\\"x\\"} 2\\na_total{k=\\"y\\"} 3\\n").values
    {'a_total': 5.0}
    >>> reading_of("<html>").values
    {}
    """
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_bucket") and "le" in sample.labels:
                    own = buckets.setdefault(family.name, {})
                    edge = float(sample.labels["le"])
                    own[edge] = own.get(edge, 0.0) + sample.value
                elif math.isfinite(sample.value):
                    values[sample.name] = values.get(sample.name, 0.0) + sample.value
    except (
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
    ):  # what its parser raises on other text
        return Reading({}, {})
    return Reading(values, {name: tuple(sorted(own.items())) for name, own in buckets.items()})


def _fetched(server: Server) -> tuple[int, bytes]:
    parts, end = urlsplit(server.url), clock.monotonic() + TIMEOUT_S
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
        connection.request("GET", f"{parts.path}/metrics", headers={"accept": "text/plain", **headers})
        with http.client.HTTPResponse(_Bounded(connection.sock, end), method="GET") as response:  # type: ignore[arg-type]
            response.begin()
            return response.status, response.read(_MOST_BYTES + 1)
    finally:
        connection.close()


class _Bounded:
    """A socket as HTTPResponse reads it, until a time of `clock.monotonic`."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_Answer(self._sock, self._end))


class _Answer(io.RawIOBase):
    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # any writable buffer
        left = self._end - clock.monotonic()
        if left <= 0:
            raise TimeoutError(f"no whole answer within {TIMEOUT_S:g} s")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)
