"""Listening sockets: bind an address before slow work begins, with an error that says what to change."""

import errno
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from penstock.core.errors import UsageError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
"""Host names of this machine that no other machine can reach."""
_BACKLOG = 1024


def host_name(header: str) -> str | None:
    """Return the name in a Host header, in lower case and without a port; None: there is none.

    >>> host_name("LOCALHOST:8000"), host_name("[::1]:8000"), host_name("[::1")
    ('localhost', '::1', None)
    """
    try:
        return urlsplit(f"//{header}").hostname
    except ValueError:
        return None


def is_loopback(name: str | None) -> bool:
    """Return whether a name or address is one of this machine that no other machine can reach.

    >>> [is_loopback(name) for name in ("localhost", "127.0.0.2", "127.0.0.1.example", None)]
    [True, True, False, False]
    """
    if name is None or name in LOOPBACK:
        return name is not None
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def open_socket(host: str, port: int) -> socket.socket:
    """Bind an address; the caller listens and closes.

    Args:
        port: 0: a free port.

    Raises:
        UsageError: the address is in use, or not of this machine.
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
        raise UsageError(f"Cannot listen on {host}:{port}: {error.strerror}", fix=fix) from None
    return sock


def listen_at(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens on the address by which others reach this machine, or None.

    None: no address is given, or it cannot be bound to: it is translated on the way, or is a name that means
    the loopback only here. The caller then listens on all addresses.
    """
    if not address:
        return None
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    if is_loopback(str(where[0])) and not is_loopback(address):
        return None  # Debian's /etc/hosts has the machine's own name at 127.0.1.1
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        return None
    return made
