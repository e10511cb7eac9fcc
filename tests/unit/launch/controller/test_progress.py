"""Progress that the operator reads from pods, which it does not trust."""

import socket
import threading
from contextlib import contextmanager, suppress

from penstock.launch.controller import progress

PAGE = b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\npenstock_train_step 12\npenstock_train_loss 2.5\n"
LOOP = "127.0.0.1"


@contextmanager
def server(answer):
    """Serve one connection on the loopback; yields the port."""
    with socket.create_server((LOOP, 0)) as listening:
        port = listening.getsockname()[1]

        def serve():
            peer, _ = listening.accept()
            with peer, suppress(OSError):
                peer.recv(1 << 16)
                answer(peer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield port
        finally:
            with suppress(OSError), socket.create_connection((LOOP, port)):  # if nobody else came
                pass
            thread.join()


def test_progress_is_read_past_pods_where_nobody_listens(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a port at which nothing listens
    with server(lambda peer: peer.sendall(PAGE)) as port:
        assert progress.ask_pods(["127.0.0.2", LOOP], port) == {"step": 12, "loss": 2.5}


def test_a_redirect_is_not_followed():
    with server(lambda peer: peer.sendall(PAGE)) as port:
        head = f"HTTP/1.0 302 Found\r\nLocation: http://{LOOP}:{port}/metrics\r\n\r\n".encode()
        with server(lambda peer: peer.sendall(head)) as first:
            assert progress.ask_pods([LOOP], first) == {}


def test_a_page_without_an_end_is_cut():
    def pour(peer):
        while True:
            peer.sendall(PAGE * 1000)

    with server(pour) as port:
        assert progress.ask_pods([LOOP], port)["step"] == 12


def test_a_pod_that_answers_byte_by_byte_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(progress, "_ANSWER_S", 0.3)
    is_over = threading.Event()

    def drip(peer):
        while not is_over.wait(0.05):  # each byte is within the time of a read
            peer.sendall(b"H")

    with server(drip) as port:
        try:
            assert progress.ask_pods([LOOP], port) == {}
        finally:
            is_over.set()


def test_pods_that_do_not_answer_share_one_deadline(monkeypatch):
    monkeypatch.setattr(progress, "_ALL_S", 0.0)
    with server(lambda peer: peer.sendall(PAGE)) as port:
        assert progress.ask_pods([LOOP], port) == {}
