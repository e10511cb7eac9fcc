"""HTTP connections with limits on the lines before a body, whose every request hears when its client leaves.

Uvicorn waits for ever for a client that sends half a request line; a few thousand of those take all
descriptors of the process. It also keeps headers of any size. The body's limits are in `body.py`.
"""

import asyncio
import re
from collections import deque

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

HEAD_TIMEOUT_S = 20.0
MAX_HEAD_BYTES = 1 << 16


_UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*(?=\r\n)", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    r"""Return the head of a request, and what follows, without the wish to speak another protocol.

    Clients of Java ask for HTTP/2 in every request; the parser takes what follows such a head for that
    protocol already, and the body is lost. A server may pass the wish over (RFC 9110, section 7.8).

    >>> without_upgrade(b"POST / HTTP/1.1\r\nUpgrade: h2c\r\nA: b\r\n\r\nbody")
    b'POST / HTTP/1.1\r\nA: b\r\n\r\nbody'
    """
    head, mark, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"", head + mark) + rest


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection whose request line and headers do not come in time, or do not end."""

    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _is_between = True
    """Whether the next byte begins a request. What a body is robbed of would be taken from the next one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._cycles: deque[RequestResponseCycle] = deque()
        self._begin()

    def data_received(self, data: bytes) -> None:
        """Count what came before the end of the headers."""
        if self._is_between:
            data = without_upgrade(data)
        super().data_received(data)
        if self._deadline is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._give_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop()
        self._leave()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin to wait for the end of a later request's headers."""
        self._is_between = False
        self._begin()
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Expect another request."""
        super().on_message_complete()
        self._is_between = True

    def on_headers_complete(self) -> None:
        """Stop waiting: the head is there."""
        self._stop()
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
        """Tell every request that the client has gone; Uvicorn tells only the newest of a connection."""
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
        self._leave()
