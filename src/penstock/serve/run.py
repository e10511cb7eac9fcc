"""Runs the server until a signal: readiness ends at once, then answers may, then the process.

The first SIGTERM or Ctrl-C begins to drain: `/ready` says 503, new requests and those whose bodies are still
on their way are refused, while answers in the making go on, for so many seconds at most; what is left is
cancelled. The socket stays open meanwhile, so that a gateway which has not noticed yet gets an answer instead
of a refused connection. The second signal ends the process without waiting.
"""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from penstock.core.errors import UsageError
from penstock.serve.patience import PatientProtocol
from penstock.serve.served import Service

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_LAST_BYTES_S = 5
"""For what was cancelled to say so to its client."""


def open_socket(host: str, port: int) -> socket.socket:
    """Take an address, before a model is loaded for it.

    Args:
        port: 0: a free one.

    Raises:
        UsageError: the address is taken, or not of this machine.
    """
    try:
        if not 0 <= port < 1 << 16:
            raise OSError("a port is from 0 to 65,535")
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"No address {host}:{port}: {error}", fix="See --host and --port.") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        is_elsewhere = error.errno == errno.EADDRNOTAVAIL
        fix = (
            "Give an address of this machine as --host."
            if is_elsewhere
            else "Give another --port; 0 finds one."
        )
        raise UsageError(f"{host}:{port} cannot be listened at: {error.strerror}", fix=fix) from None
    return sock


def run(
    app: ASGIApp,
    service: Service,
    *,
    sock: socket.socket,
    drain_s: float,
    on_started: Callable[[], None],
) -> str | None:
    """Serve until told to end; return what was wrong with that end, if anything.

    Args:
        drain_s: for answers in the making to end once a signal came.
        on_started: called when connections are taken.
    """
    config = uvicorn.Config(
        app,
        http=PatientProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # a client's address is what it connected from, not what it says
        timeout_graceful_shutdown=_LAST_BYTES_S,
        timeout_keep_alive=30,
        backlog=2048,
    )
    server = _Server(config, service, drain_s=drain_s, on_started=on_started)
    server.run(sockets=[sock])
    if server.force_exit:
        return "a second signal came before all answers had ended"
    return service.bridge.engine.failure


class _Server(uvicorn.Server):
    """Uvicorn's server, with draining before its shutdown."""

    def __init__(
        self, config: uvicorn.Config, service: Service, *, drain_s: float, on_started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_s = drain_s
        self._on_started = on_started
        self._told = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.create_task(self._end_when_told())
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain at the first signal, end at the second."""
        if self._service.draining:
            self.should_exit = self.force_exit = True
        self._service.draining = True
        log.info("signal name=%s", signal.Signals(sig).name)
        if self._loop is None:  # nothing has begun yet
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._told.set)

    async def _end_when_told(self) -> None:
        while not self._told.is_set() and self._service.bridge.engine.failure is None:
            try:
                await asyncio.wait_for(self._told.wait(), _LOOK_EVERY_S)
            except TimeoutError:
                continue
        self._service.draining = True
        self._service.bodies.end()
        bridge = self._service.bridge
        try:
            await asyncio.wait_for(bridge.wait_idle(), self._drain_s)
        except TimeoutError:
            log.warning("draining took longer than drain_s=%g; what is left is cancelled", self._drain_s)
            bridge.cancel_all()
        self.should_exit = True
