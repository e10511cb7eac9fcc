"""How a report is shown, and what a machine's checks become when they fail."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.core.errors import CorpusError, UsageError
from penstock.doctor import run_checks as examining
from penstock.doctor.checks.check import (
    BETWEEN,
    Check,
    CheckOptions,
    Finding,
    Level,
    green,
    merged,
    of_check,
    red,
    worst,
    yellow,
)
from penstock.doctor.report import DoctorReport, as_json, as_text

MTU = yellow("eth0 has an MTU of 1500", remedy="ip link set eth0 mtu 9000", check="interfaces")


def on(finding: Finding, *nodes: int) -> Finding:
    return replace(finding, nodes=nodes)


REPORT = DoctorReport(
    hosts={0: "red", 1: "blue"},
    num_nodes=2,
    findings=[
        on(green("8 x A100", check="devices"), 0, 1),
        on(MTU, 1),
        on(red("Nothing passes between a and b", remedy="Check the cable.", check="links"), BETWEEN),
    ],
    facts={},
    links=[],
    num_local=8,
    seconds=12.3,
)


def test_a_finding_of_no_check_is_refused() -> None:
    with pytest.raises(ValueError, match="names no check: 8 x A100"):
        replace(REPORT, findings=[green("8 x A100")])


def test_what_all_nodes_share_is_said_once_and_what_lies_between_them_last() -> None:
    assert "\n".join(as_text(REPORT)) == (
        "all nodes\n"
        "  green   devices       8 x A100\n"
        "\n"
        "node 1 (blue)\n"
        "  yellow  interfaces    eth0 has an MTU of 1500\n"
        "                        -> ip link set eth0 mtu 9000\n"
        "\n"
        "between nodes\n"
        "  red     links         Nothing passes between a and b\n"
        "                        -> Check the cable.\n"
        "\n"
        "2 nodes: 1 green, 1 yellow, 1 red, in 12.3 s"
    )


def test_json_has_the_same_lines_and_the_worst_level() -> None:
    shown = as_json(REPORT)
    assert shown["level"] == "red"
    assert shown["nodes"] == [{"node": 0, "host": "red"}, {"node": 1, "host": "blue"}]
    assert [(row["check"], row["level"], row["nodes"]) for row in shown["findings"]] == [
        ("devices", "green", [0, 1]),
        ("interfaces", "yellow", [1]),
        ("links", "red", []),
    ]


def test_findings_that_differ_in_a_value_stay_apart() -> None:
    other = replace(MTU, what="eth0 has an MTU of 1400")
    assert merged([on(MTU, 0), on(other, 1), on(MTU, 2)]) == [on(MTU, 0, 2), on(other, 1)]


def test_nothing_found_is_green() -> None:
    assert worst([]) is Level.GREEN


class Failing:
    """A check that raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def measure(self, _asked: CheckOptions) -> None:
        raise self._error

    def judge(self, _facts: None) -> Iterator[Finding]:
        yield green("never")


def checked(monkeypatch: pytest.MonkeyPatch, check: Check) -> list[Finding]:
    monkeypatch.setattr(examining, "CHECKS", {"failing": check})
    return examining.examine_here(CheckOptions(folder=Path()))[0]


def test_what_cannot_be_measured_is_a_line_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = checked(monkeypatch, Failing(CorpusError("Corpus x is gone", fix="Bring it back.")))
    assert (found.level, found.what) == (Level.RED, "Corpus x is gone. Bring it back")
    assert found.check == "failing"
    (found,) = checked(monkeypatch, Failing(PermissionError("not yours")))
    assert (found.level, found.what) == (Level.YELLOW, "Not measured: not yours")


def test_a_finding_has_the_name_of_its_check_unless_it_gives_another():
    assert [one.check for one in of_check("links", [green("a"), green("b", check="clocks")])] == [
        "links",
        "clocks",
    ]


def test_what_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError):
        checked(monkeypatch, Failing(UsageError("--store makes no sense")))
