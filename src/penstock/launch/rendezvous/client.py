"""A node's side of the rendezvous: join a round, watch its nodes, leave, or end the run for all."""

import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.launch.rendezvous.membership import Entry, NodeOffer, RendezvousInfo, View
from penstock.launch.rendezvous.signed import (
    CODE_BYTES,
    HEAD_BYTES,
    NONCE_BYTES,
    NotSigned,
    Session,
    hello,
    session_of,
)

KEEP_ALIVE_S, LOST_AFTER_S = 2.0, 12.0
"""Seconds between two signs of life of a node, and the silence after which it is lost."""
_ANSWER_S = 30.0
"""Seconds that a node waits for an answer, and tries to reach the server."""
_AGAIN_S = 0.2
_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_ASK_S = 0.5
"""Pause between two questions of a node that waits to be let in."""


class RendezvousGone(PenstockError):
    """The server of the rendezvous does not answer."""


class RendezvousClosed(PenstockError):
    """The other nodes have ended the run.

    Args:
        code: exit code of the run.
    """

    def __init__(self, code: int) -> None:
        super().__init__("The other nodes have ended the run")
        self.code = code


class JoinTimeout(PenstockError):
    """Fewer nodes came than a round needs, or those that train did not let this one in."""


class RoundBroken(PenstockError):
    """A member left between the end of a round and its start."""


class Rendezvous:
    """Connection of one node; made again where it breaks off. Signs of life are given by a thread.

    Args:
        number: of the node in the run: members of a round are in this order.
        address: of this node, at which other nodes reach it.

    Raises:
        RendezvousGone: there is no server, or it has another key.
    """

    def __init__(self, host: str, port: int, *, key: str, number: int, address: str) -> None:
        self._host, self._port, self._key = host, port, key
        self._number, self._address, self._node = number, address, secrets.token_hex(8)
        self._lock = threading.Lock()
        self._line: tuple[socket.socket, Session] | None = None
        self._ended = threading.Event()
        self._connect(_ANSWER_S)
        self._beating: threading.Thread | None = None

    def join(self, timeout_s: float) -> RendezvousInfo:
        """Wait until this node is a member of a round; where it was one of an earlier round, it leaves that.

        A node that is spare waits without a limit.

        Raises:
            JoinTimeout: the time is over.
            RoundBroken: join again.
            RendezvousClosed: the run has ended.
            RendezvousGone: the server does not answer.
        """
        self._ask("leave")
        end = clock.monotonic() + timeout_s
        while True:
            offer = NodeOffer(number=self._number, address=self._address, port=free_port())
            said = self._ask("join", offer=asdict(offer))
            entry = Entry(said["entry"])
            if entry is Entry.MEMBER:
                self._beat()
                return RendezvousInfo(**said["info"])
            if entry is Entry.CLOSED:
                raise RendezvousClosed(int(said["exit_code"]))
            if entry is Entry.BROKEN:
                raise RoundBroken("No start with the nodes that met: one of them has left since")
            now = clock.monotonic()
            if entry is Entry.SPARE:
                end = now + timeout_s
            if now > end:
                self.leave()
                raise JoinTimeout(f"No round within {timeout_s:g} s")
            clock.sleep(_ASK_S)

    def heartbeat(self) -> View:
        """Tell that this node is alive; return which nodes there are.

        Raises:
            RendezvousGone: the server does not answer.
        """
        return View(**self._ask("heartbeat"))

    def leave(self) -> None:
        """Take this node out, so that the others need not miss its signs of life; then none are given."""
        self.stop()
        self._ask("leave")

    def close(self, exit_code: int) -> None:
        """End the run for all nodes."""
        self._ask("close", exit_code=exit_code)

    def stop(self) -> None:
        """Give no more signs of life."""
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
            self._beating = None

    def end(self) -> None:
        """Hang up."""
        self.stop()
        self._hang_up()

    def _beat(self) -> None:
        if self._beating is None:
            self._ended.clear()
            self._beating = threading.Thread(target=self._give_signs, name="rendezvous", daemon=True)
            self._beating.start()

    def _give_signs(self) -> None:
        while not self._ended.wait(KEEP_ALIVE_S):
            with suppress(RendezvousGone):  # the main thread sees that, too
                self._ask("heartbeat")

    def _ask(self, ask: str, **values: Any) -> Any:  # Any: what JSON holds
        """Return the answer to a question; each may be asked twice, as where a connection broke off."""
        with self._lock:
            try:
                return self._answer(ask, values)
            except (OSError, NotSigned):
                pass
            try:
                return self._answer(ask, values)
            except (OSError, NotSigned) as error:
                raise self._gone(error) from None

    def _answer(self, ask: str, values: dict[str, Any]) -> Any:  # Any: what JSON holds
        if self._line is None:
            self._connect(0.0)
        assert self._line is not None
        line, session = self._line
        try:
            line.sendall(session.signed({"ask": ask, "node": self._node, **values}))
            head = _received(line, HEAD_BYTES)
            return session.read(head, _received(line, session.num_bytes(head)))
        except BaseException:  # a signal too: the next answer would be that of this question
            self._hang_up()
            raise

    def _connect(self, patience_s: float) -> None:
        end = clock.monotonic() + patience_s
        while True:
            try:
                self._open()
                return
            except OSError as error:
                if clock.monotonic() > end:
                    raise self._gone(error, patience_s) from None
            except NotSigned as error:
                raise RendezvousGone(
                    f"The rendezvous at {self._host}:{self._port} has another key than this node: {error}",
                    fix="The run has been started again since; or set the same key on each machine.",
                ) from None
            clock.sleep(_AGAIN_S)

    def _open(self) -> None:
        line = socket.create_connection((self._host, self._port), timeout=_ANSWER_S)
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            said = hello()
            line.sendall(said)
            session = session_of(self._key, said, _received(line, NONCE_BYTES + CODE_BYTES))
        except BaseException:
            line.close()
            raise
        self._line = line, session

    def _hang_up(self) -> None:
        if self._line is not None:
            self._line[0].close()
            self._line = None

    def _gone(self, error: Exception, patience_s: float = _ANSWER_S) -> RendezvousGone:
        return RendezvousGone(
            f"The rendezvous at {self._host}:{self._port} did not answer within {patience_s:g} s: "
            f"{getattr(error, 'strerror', '') or error or type(error).__name__}",
            fix="The run has ended, or its job waits in the queue again; if it runs, look at the network.",
        )


def free_port() -> int:
    """Return a port that nothing listens on now, below those of outgoing connections."""
    while True:
        port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
        with socket.socket() as asking, suppress(OSError):
            asking.bind(("", port))
            return port


def _received(line: socket.socket, num_bytes: int) -> bytes:
    """Return exactly so many bytes.

    Raises:
        OSError: the peer hung up.
    """
    found = bytearray()
    while len(found) < num_bytes:
        if not (more := line.recv(num_bytes - len(found))):
            raise ConnectionResetError("the peer hung up")
        found += more
    return bytes(found)
