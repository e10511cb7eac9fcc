"""Ports for servers that are started by a port's number.

The kernel gives ports from 32768 on to outgoing connections. A server that is told such a port finds it
taken now and then, because a connection of another test took it in between.
"""

import random
import socket
from contextlib import ExitStack, suppress


def free_ports(count: int) -> list[int]:
    """Return TCP ports of the loopback on which nothing listens, below those of outgoing connections."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.Random().sample(range(12_000, 32_000), 100 + count):
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
            if len(found) == count:
                break
    return found


def free_port() -> int:
    """Return one such port."""
    (port,) = free_ports(1)
    return port
