"""A store listens where its ranks come from, and nowhere else."""

import os
import signal
import socket
from datetime import timedelta

import pytest

from penstock.core.listen import listen_at
from penstock.launch.rendezvous.server import start_server
from penstock.launch.rendezvous.signed import new_key
from penstock.launch.spec import node_range
from penstock.parallel.hosted_store import hosted_store

SHORT = timedelta(seconds=10)


def listeners(port):
    """Return the local addresses that listen on a port, in hexadecimal, as the kernel lists them."""
    found = set()
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as file:  # noqa: PTH123 - of this network
            rows = [line.split() for line in file.readlines()[1:]]
        found |= {
            row[1].partition(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"
        }
    return found


def test_a_store_on_the_loopback_is_not_reached_by_another_address():
    store = hosted_store("127.0.0.1", 0, timeout=SHORT)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert listeners(store.port) == {"0100007F"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)


def test_the_rendezvous_of_a_launcher_listens_on_the_address_that_it_is_told():
    process, port = start_server(node_range("1:2"), key=new_key(), address="127.0.0.1")
    try:
        assert listeners(port) == {"0100007F"}
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        process.close()


def test_without_an_address_it_listens_on_all():
    assert listeners(hosted_store("", 0, timeout=SHORT).port) <= {"0" * 8, "0" * 32}


def test_an_address_of_another_machine_is_not_bound_to():
    assert listen_at("192.0.2.1", 0) is None  # a service's, say, whose packets are translated


def test_a_name_that_is_the_loopback_only_here_is_not_bound_to(monkeypatch):
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert listen_at("node-7", 0) is None
