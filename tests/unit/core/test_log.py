"""The log on standard error: one line an event, as a sentence or as keys; warnings from any rank."""

import json
import logging
import re
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import UsageError
from penstock.core.log import (
    Event,
    EventLog,
    _logfmt,
    choose_format,
    is_set_up,
    print_event,
    set_up,
    warnings_once,
)
from tests.examples import examples

log = logging.getLogger("penstock.somewhere")
SAVED = Event(
    "saved", "saved step {step:,} in {write_s:.1f} s: {path:shell}", step=1200, write_s=0.25, path="a b"
)
STAMP = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ "


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of a process that has just begun, whatever fixtures of a module set up; restored afterwards."""
    logger = logging.getLogger("penstock")
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    monkeypatch.setenv("PENSTOCK_LOG_FORMAT", "text")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of standard error, without the time."""
    return [re.sub(f"^{STAMP}", "", line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, ["Event 2.", "Warning: Odd 3."]),
        ({"rank": 1}, ["Warning: Odd 3."]),
        ({"verbose": True, "rank": 1}, ["Detail 1.", "Event 2.", "Warning: Odd 3."]),
    ],
    ids=str,
)
def test_each_rank_says_what_is_its_to_say(
    capsys: pytest.CaptureFixture[str], options: dict[str, int], shown: list[str]
) -> None:
    set_up(**options)  # type: ignore[arg-type]
    events = EventLog("penstock.somewhere")
    events.debug("detail", "detail {n}", n=1)
    events.info("event", "event {n}", n=2)
    events.warning("odd", "odd {n}", n=3)
    assert lines(capsys) == shown


def test_a_record_names_the_module_that_logs(caplog: pytest.LogCaptureFixture) -> None:
    events = EventLog("penstock.somewhere")
    caplog.set_level(logging.DEBUG)
    methods = (events.debug, events.info, events.warning, events.error, events.exception)
    for log_it in (*methods, partial(events.log, 20)):
        log_it("saved", "Saved")
    assert len(caplog.records) == 6
    assert {record.module for record in caplog.records} == {"test_log"}


def test_a_failure_is_logged_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    set_up()
    events = EventLog("penstock.somewhere")
    try:
        raise ValueError("of this place")
    except ValueError as error:
        events.exception("broken", "{what} is broken", what="it")
        events.error("failed", "{what} failed", what="it", exc_info=error)
    found = lines(capsys)
    assert [found[0], found.count("ValueError: of this place")] == ["Error: it is broken.", 2]


def test_setting_up_twice_does_not_say_things_twice(capsys: pytest.CaptureFixture[str]) -> None:
    assert not is_set_up()
    set_up()
    set_up()
    assert is_set_up()
    log.warning("once")
    assert lines(capsys) == ["Warning: once."]


def test_a_command_says_each_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_once():
        for _ in range(3):
            log.warning(Event("unanswered", "{place} does not answer", place="far.example"))
            log.info("event")
        log.warning("odd")
    assert lines(capsys) == ["Warning: far.example does not answer.", "Warning: odd."]
    assert not is_set_up()


def test_a_terminal_gets_sentences_without_a_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    set_up()
    log.info(SAVED)
    log.info("What to do next:\n  draw it\n  export it")
    assert capsys.readouterr().err == (
        "Saved step 1,200 in 0.2 s: 'a b'.\nWhat to do next:\n  draw it\n  export it.\n"
    )


def test_a_file_gets_the_same_sentences_with_the_time_each_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_up()
    log.info(SAVED)
    log.info("What to do next:\n  draw it\n  export it")
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(f"{STAMP}Saved step 1,200 in 0\\.2 s: 'a b'\\.", first)
    assert second.endswith("Z What to do next: draw it; export it.")


def test_json_has_the_values_of_the_sentence_and_a_traceback_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    choose_format("json")
    set_up()
    try:
        raise ValueError("wrong")
    except ValueError:
        log.exception(SAVED)
    (line,) = capsys.readouterr().err.splitlines()
    found = json.loads(line)
    assert re.fullmatch(STAMP.strip(), found.pop("time"))
    assert "ValueError: wrong" in found.pop("traceback")
    assert found == {
        "level": "error",
        "logger": "penstock.somewhere",
        "event": "saved",
        "step": 1200,
        "write_s": 0.25,
        "path": "a b",
        "message": "saved step 1,200 in 0.2 s: 'a b'",
    }


def test_logfmt_has_them_as_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    choose_format("logfmt")
    print_event(SAVED)
    (line,) = lines(capsys)
    pairs = " ".join(line.split(" ")[1:])
    assert pairs.startswith(
        'level=info logger=penstock event=saved step=1200 write_s=0.25 path="a b" message="'
    )


def test_values_that_json_has_no_form_for_are_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    choose_format("json")
    print_event(Event("odd", "{a} {b} {c}", a=float("nan"), b={1: {2.5}}, c=ValueError("no")))
    found = json.loads(capsys.readouterr().err)
    assert (found["a"], found["b"], found["c"]) == ("nan", {"1": [2.5]}, "no")


PAIR = re.compile(r'([^\s="]+)=("(?:[^"\\]|\\.)*"|[^\s="]*)(?: |$)')


@given(st.dictionaries(st.from_regex("[a-z_]{1,8}", fullmatch=True), st.text(), max_size=4))
@examples(100)
def test_logfmt_is_read_back_whatever_the_values(values: dict[str, str]) -> None:
    line = _logfmt(values)
    assert not {"\n", "\r"} & {*line}
    read = {name: json.loads(text) if text.startswith('"') else text for name, text in PAIR.findall(line)}
    assert read == values


def test_another_format_is_refused_with_the_choices() -> None:
    with pytest.raises(
        UsageError, match=r"--log-format is text, logfmt or json .got 'jsn'.. Did you mean 'json'"
    ):
        choose_format("jsn")


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (Event("saved", "saved step 7: runs/a"), "Saved step 7: runs/a"),
        (Event("saved", "{path} is not a folder", path="nowhere"), "nowhere is not a folder."),
        (
            Event("going_back", "{why:sentence}. Going back", why="the loss rose"),
            "The loss rose. Going back.",
        ),
        ("write it by --out FOLDER", "Write it by --out FOLDER"),
        ("use --set compute=float32", "Use --set compute=float32"),
        (Event("step", "step {step} at 3.1 tokens/s", step=7), "Step 7 at 3.1 tokens/s."),
        (Event("loss", "loss 2.4 (1.25 bits/byte)"), "Loss 2.4 (1.25 bits/byte)."),
        (Event("cut", "data.packing may cut"), "data.packing may cut."),
    ],
)
def test_sentences_keep_the_letters_of_names_and_no_stop_follows_a_path_or_option(
    said: Event | str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    set_up()
    log.info(said)
    assert lines(capsys) == [line]


def test_what_an_error_begins_with_keeps_its_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_event("nowhere is not a folder. Give a run.", level=logging.ERROR)
    assert capsys.readouterr().err.endswith("Error: nowhere is not a folder. Give a run.\n")
