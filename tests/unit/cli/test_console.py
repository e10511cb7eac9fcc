"""`penstock console`: what it refuses before it listens."""

import pytest

from penstock.cli.main import main


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "trainer", "10.0.0.7"])
def test_a_console_for_other_machines_needs_keys(tmp_path, capsys, host):
    assert main(["console", str(tmp_path), "--host", host]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"--host {host} opens the console to other machines, and there is no key" in said
    assert "Give --key-file FILE" in said


def test_a_console_behind_a_proxy_needs_keys_and_a_plain_name(tmp_path, capsys):
    for name, wanted in (
        ("runs.example", "--name runs.example opens the console to other machines, and there is no key"),
        ("https://runs.example", "--name is a host name, without scheme and port"),
        ("runs.example:8443", "--name is a host name, without scheme and port"),
    ):
        assert main(["console", str(tmp_path), "--name", name]) == 2
        assert wanted in " ".join(capsys.readouterr().err.split())
