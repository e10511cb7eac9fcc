"""Server of a rendezvous: a process that holds the membership of one run, and answers its nodes.

It lives beside the nodes, so that any node may go. Whoever reaches its port without the run's key learns
nothing and changes nothing: a connection that does not begin with a signed message is closed.
"""

import asyncio
import multiprocessing
import os
import signal
import socket
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.process import BaseProcess
from typing import Any

from penstock.core import clock
from penstock.core.env import raise_descriptor_limit
from penstock.core.errors import PenstockError
from penstock.core.listen import listen_at
from penstock.launch.local import die_with
from penstock.launch.rendezvous.client import LOST_AFTER_S
from penstock.launch.rendezvous.membership import Membership, NodeOffer
from penstock.launch.rendezvous.signed import HEAD_BYTES, MAGIC, NONCE_BYTES, NotSigned, answer_to
from penstock.launch.spec import NodeRange

LAST_CALL_S = 3.0
"""Seconds that enough nodes wait for more."""
_BACKLOG = 1024
_HELLO_S = 5.0
_SILENCE_S = 120.0
"""Seconds after which a connection without messages is closed; nodes say something every few seconds."""

Question = Mapping[str, Any]  # Any: what JSON holds


def start_server(
    nodes: NodeRange, *, key: str, address: str, port: int = 0, last_call_s: float = LAST_CALL_S
) -> tuple[BaseProcess, int]:
    """Start the process that holds a run's membership; return it and its port. It ends with this one.

    Args:
        nodes: with which a round begins, and which it takes at most.
        key: without which no node is answered.
        address: of this machine, on which it listens; empty: on all.
        port: 0: any free one.
        last_call_s: seconds for which enough nodes wait for more.

    Raises:
        PenstockError: it cannot listen there.
    """
    try:
        listening = listen_at(address, port) or _on_all_addresses(port)
    except OSError as error:
        raise PenstockError(
            f"The rendezvous of the run cannot listen: {error.strerror}",
            got=f"{address or 'all addresses'}, port {port}",
            fix="Another run may use that port.",
        ) from None
    membership = Membership(
        min_nodes=nodes.least, max_nodes=nodes.most, last_call_s=last_call_s, lost_after_s=LOST_AFTER_S
    )
    with listening:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_serve, args=(membership, key, listening, os.getpid()))
        process.start()
        return process, listening.getsockname()[1]


def _on_all_addresses(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _serve(membership: Membership, key: str, listening: socket.socket, parent: int) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise_descriptor_limit()
    asyncio.run(_listen(membership, key, listening))


async def _listen(membership: Membership, key: str, listening: socket.socket) -> None:
    async def speak(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(NotSigned, OSError, EOFError):
            await _answer(membership, key, reader, writer)
        writer.close()

    server = await asyncio.start_server(speak, sock=listening, backlog=_BACKLOG)
    await server.serve_forever()


async def _answer(membership: Membership, key: str, reader: StreamReader, writer: StreamWriter) -> None:
    """Answer one node until its connection ends."""
    async with asyncio.timeout(_HELLO_S):
        answer, session = answer_to(key, await reader.readexactly(len(MAGIC) + NONCE_BYTES))
        writer.write(answer)
        await writer.drain()
        head = await reader.readexactly(HEAD_BYTES)
        asked = session.read(head, await reader.readexactly(session.num_bytes(head)))
    while True:
        writer.write(session.signed(answered(membership, asked, clock.monotonic())))
        async with asyncio.timeout(_SILENCE_S):
            await writer.drain()
            head = await reader.readexactly(HEAD_BYTES)
            asked = session.read(head, await reader.readexactly(session.num_bytes(head)))


def answered(membership: Membership, asked: Question, now: float) -> dict[str, Any]:  # Any: what JSON holds
    """Return the answer to a question of a node, which has the key."""
    node = str(asked["node"])
    match asked["ask"]:
        case "join":
            entry, info = membership.join(node, NodeOffer(**asked["offer"]), now)
            return {
                "entry": entry.value,
                "info": asdict(info) if info else None,
                "exit_code": membership.exit_code,
            }
        case "leave":
            membership.leave(node, now)
            return {}
        case "close":
            membership.close(int(asked["exit_code"]))
            return {}
        case _:
            return asdict(membership.heartbeat(node, now))
