"""HTTP server: runs until a signal, drains, limits request heads, notices lost clients.

Uvicorn waits for ever for a client that sends half a request line; a few thousand of those use up the
process's file descriptors. It also accepts headers of any size; here more than 64 KiB get a 431, however they
are split into packets. The limits of bodies are in `request_body.py`.

The first SIGTERM or Ctrl-C starts draining: `/ready` returns 503, new requests and those whose bodies are
incomplete are refused, and running answers continue for at most `drain_s`; then they are cancelled. The
socket stays open meanwhile, so that a gateway that has not noticed yet gets a response instead of a refused
connection. A second signal exits without waiting.
"""

import asyncio
import re
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.core import clock
from penstock.core.log import EventLog
from penstock.core.signals import signal_name
from penstock.serve.errors import ApiError
from penstock.serve.state import AppState

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 1 << 16
LINGER_S = 5.0
"""Seconds that a refused client may send before its connection is reset, which may lose the response."""
MAX_LINGER_BYTES = 1 << 20
"""Bytes that a refused client may send in that time; read and dropped."""


_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    r"""Return a request's head and what follows, without its Upgrade header.

    Java clients offer HTTP/2 in every request; the parser then treats what follows the head as that protocol,
    and the body is lost. A server may ignore the header (RFC 9110, section 7.8).

    >>> without_upgrade(b"POST / HTTP/1.1\r\nUpgrade: h2c\r\nA: b\r\n\r\nbody")
    b'POST / HTTP/1.1\r\nA: b\r\n\r\nbody'
    """
    head, mark, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head + mark) + rest


class PatientProtocol(HttpToolsProtocol):
    """Closes connections whose request line and headers are too slow or too large."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _dropped_bytes = 0
    _is_refused = False
    """True if this connection is no longer read."""
    _is_between = True
    """True if the next byte starts a request. Bytes removed from a body would be missing from it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout of the first request."""
        super().connection_made(transport)
        self._cycles: deque[RequestResponseCycle] = deque()
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Receive bytes; refuse a head that is too large."""
        if self._is_refused:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > MAX_LINGER_BYTES:
                self._give_up()
            return
        if self._is_between:
            data = without_upgrade(data)
        super().data_received(data)
        if self._deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timeout."""
        self._stop()
        self._leave()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Start the timeout of a later request's headers."""
        self._is_between = False
        self._begin()
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        """Receive a part of a body."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Expect another request."""
        if self._is_refused:
            return
        super().on_message_complete()
        self._is_between = True

    def on_headers_complete(self) -> None:
        """Stop the timeout: the head is complete."""
        if self._is_refused:
            return
        self._stop()
        head = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if head > MAX_HEAD_BYTES:
            self._refuse_head()
            return
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        if self.cycle is not None:
            self._cycles.append(self.cycle)

    def _begin(self) -> None:
        self._stop()
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def _stop(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _leave(self) -> None:
        """Mark all requests as disconnected; Uvicorn marks only the newest of a connection."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def _refuse_head(self) -> None:
        """Respond with 431, unless an earlier response is unfinished, and close.

        The client may still be sending. Closing a socket with unread bytes sends a reset, after which the
        client drops the response unread; so only the write side is closed, and further bytes are read and
        dropped.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if all(cycle.response_complete for cycle in self._cycles):
            said = f"The request line and headers exceed {MAX_HEAD_BYTES:,} bytes. Send fewer."
            body = ApiError(said, status=431).body().model_dump_json().encode()
            head = (
                "HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self._leave()
        self.transport.write_eof()
        self._stop()
        self._deadline = self.loop.call_later(LINGER_S, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
        self._leave()


log = EventLog(__name__)

_LOOK_EVERY_S = 0.25
_LAST_BYTES_S = 5
"""Seconds for cancelled requests to send their last bytes."""


def run(
    app: ASGIApp,
    service: AppState,
    *,
    sock: socket.socket,
    drain_s: float,
    idle_s: float | None = None,
    on_started: Callable[[], None],
) -> str | None:
    """Serve until a signal; return why the shutdown was not clean, or None.

    Args:
        drain_s: seconds for running answers to finish after a signal.
        idle_s: seconds without a request after which it ends; None: it stays.
        on_started: called when connections are accepted.
    """
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client's address is that of the connection, not of a header
        timeout_graceful_shutdown=_LAST_BYTES_S,
        timeout_keep_alive=30,
        backlog=2048,
    )
    server = _Server(config, service, drain_s=drain_s, idle_s=idle_s, on_started=on_started)
    server.run(sockets=[sock])
    if server.force_exit:
        return "a second signal came before all answers had finished"
    return service.bridge.engine.failure


class _Server(uvicorn.Server):
    """Uvicorn's server, with draining before shutdown."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: AppState,
        *,
        drain_s: float,
        idle_s: float | None,
        on_started: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_s, self._idle_s = drain_s, idle_s
        self._on_started = on_started
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start accepting connections."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.create_task(self._end_when_told())
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain at the first signal, exit at the second."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True
        log.info("signal", "Ending: received {signal}", signal=signal_name(sig))
        if self._loop is None:  # not started yet
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._told.set)

    async def _end_when_told(self) -> None:
        num_requests, busy_s = 0, clock.monotonic()
        while not self._told.is_set() and self._service.bridge.engine.failure is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), _LOOK_EVERY_S)
            if self.server_state.tasks or self.server_state.total_requests != num_requests:
                num_requests, busy_s = self.server_state.total_requests, clock.monotonic()
            elif self._idle_s is not None and clock.monotonic() - busy_s > self._idle_s:
                log.info("idle", "No request for {idle_s:g} s: the server ends", idle_s=self._idle_s)
                break
        self._service.draining = True
        self._service.bodies.end()
        bridge = self._service.bridge
        try:
            await asyncio.wait_for(bridge.wait_idle(), self._drain_s)
        except TimeoutError:
            log.warning(
                "drain_expired",
                "Open answers are cancelled: they take longer than {drain_s:g} s",
                drain_s=self._drain_s,
            )
            bridge.cancel_all()
        self.should_exit = True
