"""The log on standard error: one line an event, rank 0 for all, warnings from any."""

import logging

import pytest

from penstock.core.log import for_people, set_up

log = logging.getLogger("penstock.somewhere")


@pytest.fixture(autouse=True)
def fresh() -> None:
    """The log of a process that has just begun, whatever fixtures of a module set up; restored afterwards."""
    logger = logging.getLogger("penstock")
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


def say_everything() -> None:
    log.debug("detail n=1")
    log.info("event n=2")
    log.warning("odd n=3")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "I penstock.somewhere event n=2\nW penstock.somewhere odd n=3\n"),
        ({"rank": 1}, "W penstock.somewhere odd n=3\n"),
        (
            {"verbose": True, "rank": 1},
            "D penstock.somewhere detail n=1\nI penstock.somewhere event n=2\nW penstock.somewhere odd n=3\n",
        ),
    ],
    ids=str,
)
def test_each_rank_says_what_is_its_to_say(
    capsys: pytest.CaptureFixture[str], options: dict[str, int], shown: str
) -> None:
    set_up(**options)  # type: ignore[arg-type]
    say_everything()
    assert capsys.readouterr().err == shown


def test_setting_up_twice_does_not_say_things_twice(capsys: pytest.CaptureFixture[str]) -> None:
    set_up()
    set_up()
    log.warning("once")
    assert capsys.readouterr().err == "W penstock.somewhere once\n"


def test_a_command_says_each_warning_once_in_words_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    with for_people():
        for attempt in range(3):
            told = {"told": "far.example does not answer"}
            log.warning("read failed attempt=%d", attempt, extra=told)
            log.info("event attempt=%d", attempt)
        log.warning("odd n=%d", 3)
    assert capsys.readouterr().err == "penstock: far.example does not answer\npenstock: odd n=3\n"
    assert logging.getLogger("penstock").handlers == []
