"""A rendezvous against peers without its key: they learn nothing, change nothing and run nothing."""

import pickle
import socket
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UsageError
from penstock.launch.rendezvous import client
from penstock.launch.rendezvous.client import Rendezvous, RendezvousGone
from penstock.launch.rendezvous.membership import View
from penstock.launch.rendezvous.server import start_server
from penstock.launch.rendezvous.signed import (
    HEAD_BYTES,
    MAGIC,
    MAX_BYTES,
    NONCE_BYTES,
    NotSigned,
    Session,
    answer_to,
    check_key,
    hello,
    new_key,
    session_of,
)
from penstock.launch.spec import node_range
from tests.examples import examples

HERE, KEY = "127.0.0.1", new_key()

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")


class Run:
    """What a pickle does that runs code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture(scope="module")
def port():
    process, found = start_server(node_range("1:2"), key=KEY, address=HERE, last_call_s=0.0)
    yield found
    process.kill()
    process.join()
    process.close()


@pytest.fixture
def member(port):
    with closing_of(Rendezvous(HERE, port, key=KEY, number=0, address=HERE)) as found:
        found.join(10)
        yield found
        found.leave()


def closing_of(rendezvous):
    rendezvous.close = rendezvous.end
    return closing(rendezvous)


def answer_of(port, said):
    """Return all that the server answers to bytes, until it hangs up."""
    with socket.create_connection((HERE, port), timeout=10) as line, suppress(ConnectionResetError):
        line.sendall(said)
        line.shutdown(socket.SHUT_WR)
        found = b""
        while more := line.recv(65536):
            found += more
        return found
    return b""


def without_key(tmp_path):
    """Return what peers without the key may say."""
    other = new_key()
    said = hello()
    _, theirs = answer_to(other, said)
    mine = session_of(other, said, answer_to(other, said)[0])
    close = {"ask": "close", "node": "0", "exit_code": 0}
    pickled = pickle.dumps(Run(tmp_path / "ran"))
    return {
        "nothing": b"",
        "a web request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "a pickle": pickled,
        "a pickle after a hello": said + len(pickled).to_bytes(4) + bytes(32) + pickled,
        "a message of another key": said + mine.signed(close),
        "the server's own direction": said + theirs.signed(close),
        "a length of gigabytes": said + b"\xff" * HEAD_BYTES,
        "half a message": said + mine.signed(close)[:-3],
    }


@pytest.mark.parametrize("what", sorted(without_key(Path())))
def test_a_peer_without_the_key_changes_nothing_and_runs_nothing(port, member, tmp_path, what):
    answer = answer_of(port, without_key(tmp_path)[what])
    assert len(answer) in (0, NONCE_BYTES + 32), "a proof of the key at most"
    assert member.heartbeat() == View(num_waiting=0, num_present=1)
    assert not (tmp_path / "ran").exists()


def test_what_a_node_said_before_cannot_be_said_again(port, member, monkeypatch):
    sent = []
    real = socket.socket.sendall
    monkeypatch.setattr(socket.socket, "sendall", lambda self, said: (sent.append(said), real(self, said))[1])
    other = Rendezvous(HERE, port, key=KEY, number=1, address=HERE)
    other._ask("join", offer={"number": 1, "address": HERE, "port": 1})
    assert member.heartbeat().num_waiting == 1
    other.leave()
    other.end()
    monkeypatch.setattr(socket.socket, "sendall", real)
    first, join, *_ = sent
    answer_of(port, first + join)
    assert member.heartbeat().num_waiting == 0


def test_a_node_with_another_key_is_told_so(port):
    with pytest.raises(RendezvousGone, match="has another key than this node"):
        Rendezvous(HERE, port, key=new_key(), number=1, address=HERE)


def test_a_connection_that_broke_off_is_made_again(member):
    member._line[0].shutdown(socket.SHUT_RDWR)
    assert member.heartbeat().num_present == 1


def test_a_signal_in_the_middle_of_a_question_mixes_up_no_answers(member, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(client, "_received", interrupted)
    with pytest.raises(KeyboardInterrupt):
        member._ask("join", offer={"number": 0, "address": HERE, "port": 1})
    monkeypatch.undo()
    assert member.heartbeat().num_present == 1


@pytest.mark.parametrize("key", ["", "short", "a" * 31])
def test_a_key_that_could_be_guessed_is_refused(key):
    with pytest.raises(UsageError, match=f"in NAME has {len(key)} characters, and needs 32"):
        check_key(key, name="NAME")


def sessions(key):
    said = hello()
    answer, answerer = answer_to(key, said)
    return session_of(key, said, answer), answerer


JSON = st.none() | st.integers() | st.text(max_size=20)


@examples(100)
@given(st.lists(JSON, max_size=4))
def test_messages_are_read_in_order_in_both_directions(values):
    for one, other in (sessions(KEY), sessions(KEY)[::-1]):
        for value in values:
            message = one.signed(value)
            head, text = message[:HEAD_BYTES], message[HEAD_BYTES:]
            assert Session.num_bytes(head) == len(text)
            assert other.read(head, text) == value


@examples(100)
@given(JSON, st.data())
def test_a_changed_byte_anywhere_is_found(value, data):
    one, other = sessions(KEY)
    message = bytearray(one.signed(value))
    at = data.draw(st.integers(4, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(NotSigned):
        other.read(bytes(message[:HEAD_BYTES]), bytes(message[HEAD_BYTES:]))


def test_a_message_out_of_turn_is_refused():
    one, other = sessions(KEY)
    first, second = one.signed(1), one.signed(2)
    with pytest.raises(NotSigned):
        other.read(second[:HEAD_BYTES], second[HEAD_BYTES:])
    assert other.read(first[:HEAD_BYTES], first[HEAD_BYTES:]) == 1
    with pytest.raises(NotSigned):
        other.read(first[:HEAD_BYTES], first[HEAD_BYTES:])


@given(st.binary(max_size=len(MAGIC) + NONCE_BYTES + 1))
def test_only_a_hello_is_answered(said):
    with pytest.raises(NotSigned):
        answer_to(KEY, said)


def test_a_message_that_is_too_long_is_refused_before_it_is_read():
    with pytest.raises(NotSigned, match="too long"):
        Session.num_bytes((MAX_BYTES + 1).to_bytes(4) + bytes(32))
