"""API keys."""

import hashlib

import pytest

from penstock.core.api_keys import read_keys, single_key
from penstock.core.errors import UsageError

KEY = "sk-0123456789abcdef"


def test_a_key_opens_in_plain_or_as_its_hash(tmp_path):
    digest = hashlib.sha256(b"another-long-secret").hexdigest()
    path = tmp_path / "keys.txt"
    path.write_text(f"# clients\nteam  {KEY}\n\nbatch sha256:{digest}  # by night\n")
    keys = read_keys(path)
    assert len(keys) == 2
    assert keys.client_of(f"Bearer {KEY}") == "team"
    assert keys.client_of("bearer another-long-secret") == "batch"


@pytest.mark.parametrize(
    "header", [None, "", KEY, f"Basic {KEY}", f"Bearer {KEY}x", "Bearer ", "Bearer ä\udcff"]
)
def test_anything_else_is_nobody(header):
    assert single_key(KEY).client_of(header) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no key"),
        ("team", "line 1: not a unique name and a key"),
        (f"team {KEY}\nteam {KEY}", "line 2: not a unique name"),
        ("team short", "the key has 5 characters and needs 16"),
    ],
)
def test_a_file_that_would_let_in_the_wrong_ones_is_refused_without_showing_keys(tmp_path, content, message):
    path = tmp_path / "keys.txt"
    path.write_text(content)
    with pytest.raises(UsageError, match=message) as refused:
        read_keys(path)
    assert KEY not in str(refused.value)


def test_a_missing_file_is_wrong_usage(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        read_keys(tmp_path / "absent")
