"""A TCP store that listens on one address of this machine: torch's own listens on all of them.

The store has no password: who reaches its port can read and write what ranks tell each other.
"""

import ipaddress
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # typed there only

_BACKLOG = 1024


def hosted_store(address: str, port: int, *, timeout: timedelta, multi_tenant: bool = False) -> TCPStore:
    """Open a store on this machine.

    Args:
        address: that it listens on, by which other ranks reach it. On all, where it is empty or cannot be
            bound to: one that is translated on the way, or a name that is the loopback only here.
        port: 0: any free one.

    Raises:
        RuntimeError: the port is in use.
    """
    listening = _listening(address, port)
    if listening is None:
        return TCPStore(
            *(address or "localhost", port, None, True, timeout), False, multi_tenant=multi_tenant
        )
    bound = listening.getsockname()
    return TCPStore(
        *(bound[0], bound[1], None, True, timeout),
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listening.detach(),  # the store closes it
    )


def _listening(address: str, port: int) -> socket.socket | None:
    """Return a socket that listens on an address; None if the store has to listen on all."""
    if not address:
        return None
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    if _is_loopback(str(where[0])) and not _is_loopback(address):
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


def _is_loopback(address: str) -> bool:
    """Return True for a loopback address, or the name that every machine has for it."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
