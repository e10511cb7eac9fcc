"""API keys: authentication of clients, and their names; no torch.

A key file has one client per line: a name, and a key or its SHA-256, so that the file need not contain the
key itself. `#` starts a comment:

    search-team  sk-2f4c9b6e1d8a47c0b7f3
    batch        sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from penstock.core.errors import UsageError

MIN_CHARACTERS = 16
"""Minimum length of a key: shorter ones can be guessed."""
_HASHED = re.compile(r"sha256:([0-9a-f]{64})")


class Keys:
    """API keys of the server.

    Args:
        digests: client name -> SHA-256 of its key.
    """

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = dict(digests)

    def __len__(self) -> int:
        return len(self._digests)

    def client_of(self, authorization: str | None) -> str | None:
        """Return the client of a header `Authorization: Bearer KEY`; None: unknown key.

        All keys are compared, each in constant time, so the response time reveals nothing about them.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest, found = _digest(key.strip()), None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found


def read_keys(path: Path) -> Keys:
    """Read a key file.

    Raises:
        UsageError: a line is not a name and a key, or there is no key; the message never contains a key.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The key file {path} cannot be read: {error}", fix="Write one `name key` per line."
        ) from None
    digests: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2 or words[0] in digests:
            raise UsageError(f"{path}, line {number}: not a unique name and a key", fix="Write `name key`.")
        digests[words[0]] = _parse(words[1], where=f"{path}, line {number}")
    if not digests:
        raise UsageError(f"{path} has no key", fix="Write one `name key` per line.")
    return Keys(digests)


def single_key(key: str) -> Keys:
    """Return the keys for a single key, of a client named "key".

    Raises:
        UsageError: the key is too short.
    """
    return Keys({"key": _parse(key, where="The API key of the environment")})


def _parse(word: str, *, where: str) -> bytes:
    if match := _HASHED.fullmatch(word):
        return bytes.fromhex(match[1])
    if len(word) < MIN_CHARACTERS:
        raise UsageError(
            f"{where}: the key has {len(word)} characters and needs {MIN_CHARACTERS}",
            fix="Make one with `openssl rand -hex 24`.",
        )
    return _digest(word)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
