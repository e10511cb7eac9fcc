"""Options that `penstock launch server` hands through to the server."""

import pytest

from penstock.cli.launch.server import _server_options
from penstock.core.errors import UsageError


def test_a_secret_in_an_option_of_the_server_is_refused_and_not_repeated():
    words = ("--insecure", "--name=sk-s3cr3tabcdefghijklmnop")
    with pytest.raises(UsageError, match="--server holds what looks like a secret") as caught:
        _server_options(words, secrets=[])
    assert "s3cr3t" not in str(caught.value)
