"""Signed messages: JSON between two processes that share a key, over any stream of bytes.

    caller   MAGIC, 32 random bytes
    answerer 32 random bytes, and a code over both: it has the key
    both     length (4 bytes), code (32 bytes), JSON

A code is HMAC-SHA256 under a key of this connection, over the direction, the number of the message and its
text. So nothing that was said before, elsewhere or in the other direction is accepted, and no byte of a peer
is parsed before its code is checked. Messages are signed and not encrypted: they hold addresses, no secrets.
"""

import hashlib
import hmac
import json
import secrets
from typing import Any

from penstock.core.errors import PenstockError, UsageError

MAGIC = b"penstock rendezvous 1\n"
NONCE_BYTES = CODE_BYTES = 32
HEAD_BYTES = 4 + CODE_BYTES
MAX_BYTES = 1 << 16
"""Bytes of one message at most."""
_MIN_CHARACTERS = 32


class NotSigned(PenstockError):
    """The peer does not have this run's key, or what it said was changed on the way."""


def new_key() -> str:
    """Return a random key of 256 bits."""
    return secrets.token_hex(32)


def check_key(key: str, *, name: str) -> str:
    """Return a key that is long enough.

    Raises:
        UsageError: it is not; `name` is the variable that holds it.
    """
    if len(key) < _MIN_CHARACTERS:
        raise UsageError(
            f"The key in {name} has {len(key)} characters, and needs {_MIN_CHARACTERS}",
            fix=f"Set it to the same random text on each machine: export {name}=$(openssl rand -hex 32).",
        )
    return key


def hello() -> bytes:
    """Return what a caller says first; its last `NONCE_BYTES` are the nonce."""
    return MAGIC + secrets.token_bytes(NONCE_BYTES)


def answer_to(key: str, said: bytes) -> tuple[bytes, "Session"]:
    """Return the answer to a hello, and the session of the answerer.

    Raises:
        NotSigned: it is no hello.
    """
    if len(said) != len(MAGIC) + NONCE_BYTES or not said.startswith(MAGIC):
        raise NotSigned("The peer does not speak this protocol")
    nonces = said[len(MAGIC) :] + secrets.token_bytes(NONCE_BYTES)
    proof = _code(key.encode(), b"answerer", nonces)
    return nonces[NONCE_BYTES:] + proof, Session(_code(key.encode(), b"session", nonces), is_caller=False)


def session_of(key: str, said: bytes, answer: bytes) -> "Session":
    """Return the session of a caller, from its hello and the answer to it.

    Raises:
        NotSigned: the answerer has another key.
    """
    nonces = said[len(MAGIC) :] + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _code(key.encode(), b"answerer", nonces)):
        raise NotSigned("The peer has another key")
    return Session(_code(key.encode(), b"session", nonces), is_caller=True)


class Session:
    """Signs and checks the messages of one connection.

    Args:
        key: of this connection.
    """

    def __init__(self, key: bytes, *, is_caller: bool) -> None:
        self._key = key
        self._mine, self._theirs = (b"caller", b"answerer") if is_caller else (b"answerer", b"caller")
        self._num_sent = self._num_read = 0

    def signed(self, value: Any) -> bytes:  # Any: what JSON holds
        """Return the next message."""
        text = json.dumps(value).encode()
        code = _code(self._key, self._mine, self._num_sent.to_bytes(8) + text)
        self._num_sent += 1
        return len(text).to_bytes(4) + code + text

    @staticmethod
    def num_bytes(head: bytes) -> int:
        """Return the bytes of text that follow a head.

        Raises:
            NotSigned: more than any message has.
        """
        if (found := int.from_bytes(head[:4])) > MAX_BYTES:
            raise NotSigned("The peer announced a message that is too long")
        return found

    def read(self, head: bytes, text: bytes) -> Any:  # Any: what JSON holds
        """Return the value of the next message.

        Raises:
            NotSigned: its code is wrong.
        """
        code = _code(self._key, self._theirs, self._num_read.to_bytes(8) + text)
        if not hmac.compare_digest(head[4:], code):
            raise NotSigned("A message has a wrong code")
        self._num_read += 1
        return json.loads(text)


def _code(key: bytes, purpose: bytes, content: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + content, hashlib.sha256)
