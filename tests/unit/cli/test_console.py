"""`penstock console`: what it refuses before it listens, and its end."""

import re
import signal
import subprocess
import sys
from urllib.request import urlopen

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


WITH_A_SILENT_STORE = """
import sys, time
from penstock.cli.main import main
from penstock.obs.run_data import discover
from penstock.storage.address import parse
from penstock.storage.object_store import Identity, StoredObject

class SilentStore:
    address = parse("s3://silent/runs")
    def folder(self, name=""):
        return [], {"metrics.jsonl": StoredObject(Identity(size=9, tag="a"), 1.0)}
    def get(self, *_, **__):
        time.sleep(600)

discover._store = lambda _: SilentStore()
sys.exit(main(["console", "s3://silent/runs", "--port", "0"]))
"""


def test_a_console_ends_while_an_object_store_does_not_answer():
    with subprocess.Popen(
        [sys.executable, "-c", WITH_A_SILENT_STORE], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            address = re.search(r"http://\S+/", process.stdout.readline())[0]
            with urlopen(f"{address}api/runs", timeout=60) as response:
                assert b"Its object store has not answered yet" in response.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
