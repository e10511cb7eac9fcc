"""What a log line says to a person at a terminal, and to a file."""

import logging

import pytest

from penstock.core import log


@pytest.fixture
def logger():
    found = logging.getLogger("penstock")
    before = found.handlers[:], found.propagate, found.level
    log.set_up()
    yield logging.getLogger("penstock.train.run")
    found.handlers[:], found.propagate = before[0], before[1]
    found.setLevel(before[2])


def said(logger, capsys, monkeypatch, *, is_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    logger.info("resumed step=%d from=%s", 40, "a/b", extra={"told": "Resumed after step 40, from a/b."})
    logger.warning("old checkpoints cannot be removed: %s", "No space left on device")
    return capsys.readouterr().err.splitlines()


def test_a_terminal_gets_sentences(logger, capsys, monkeypatch):
    assert said(logger, capsys, monkeypatch, is_terminal=True) == [
        "Resumed after step 40, from a/b.",
        "Warning: Old checkpoints cannot be removed: No space left on device.",
    ]


def test_a_file_gets_keys_and_values(logger, capsys, monkeypatch):
    assert said(logger, capsys, monkeypatch, is_terminal=False) == [
        "I penstock.train.run resumed step=40 from=a/b",
        "W penstock.train.run old checkpoints cannot be removed: No space left on device",
    ]
