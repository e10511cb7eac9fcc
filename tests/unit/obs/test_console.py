"""What a run says on a terminal and where there is none."""

import pytest

from penstock.core import clock
from penstock.obs.sinks.console import ProgressLine

RECORDS = [
    {"step": 1, "loss": 2.5, "tokens_per_s": 1000.0},
    {"step": 1, "validation_loss": 2.4, "validation_bits_per_byte": 1.25},
    {"step": 2, "loss": 2.0, "tokens_per_s": 1000.0},
    {"step": 2, "validation_loss": 1.9},
]


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    with ProgressLine(steps=2, done=0) as line:
        for record in RECORDS:
            line(record)
    return capsys.readouterr().err.splitlines()


def test_without_a_terminal_each_validation_is_a_line_the_last_one_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys)
    assert [line.partition("Z ")[2] for line in lines] == [
        "Step 1 of 2: loss 2.5000, 1k tokens/s.",
        "Step 1 of 2: validation loss 2.4000 (1.250 bits/byte).",
        "Step 2 of 2: loss 2.0000, 1k tokens/s.",
        "Step 2 of 2: validation loss 1.9000.",
    ]


def test_on_a_terminal_the_line_ends_with_the_last_validation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    assert "loss 2.0000  validation 1.9000" in "".join(said(capsys))


def test_the_first_step_does_not_say_how_long_the_rest_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles and warms up: what comes after is told from the steps after it."""
    now = 0.0
    monkeypatch.setattr(clock, "monotonic", lambda: now)
    with ProgressLine(steps=100, done=40) as line:
        for step, now in ((41, 60.0), (42, 60.5), (61, 70.5), (100, 90.0)):  # noqa: B007
            line({"step": step, "loss": 2.0, "tokens_per_s": 10.0})
    lines = capsys.readouterr().err.splitlines()
    said_steps = [line.partition("Z ")[2].partition(":")[0] for line in lines]
    assert said_steps == ["Step 41 of 100", "Step 61 of 100", "Step 100 of 100"]
    assert "left" not in lines[0]
    assert lines[1].endswith("20.5 s left.")  # 39 steps of 10.5 s / 20
    assert "left" not in lines[2]
