"""Which cases of the GPU kit run in a time, and that its two commands have the time they promise."""

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from gpu_parts.cases import CANARIES, CASES, COMMAND_S, COMMANDS, SPEED, choose, named, of_command
from gpu_parts.unfit import Unfit

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "gpu_parts"


@pytest.mark.parametrize("command", COMMANDS)
def test_all_cases_of_a_command_have_their_time_in_it(command):
    choice = choose(of_command(command), COMMAND_S)
    assert not choice.left_out
    assert choice.seconds <= COMMAND_S


def test_the_commands_cover_every_case_and_have_only_the_planner_in_common():
    assert set(of_command("")) == {case for command in COMMANDS for case in of_command(command)}
    in_both = [case.name for case in CASES if len(case.commands) > 1]
    assert in_both == ["plan"]


def test_every_case_is_known_to_the_script_of_its_part():
    for case in (*CASES, *CANARIES.values()):
        script = (SCRIPTS / f"{case.part}.py").read_text()
        assert f'"{case.name}"' in script


def test_what_is_worth_most_comes_first():
    parts = list(dict.fromkeys(case.part for case in of_command(SPEED)))
    assert parts == ["training", "serving", "kernels", "equalities", "planner"]


def test_a_part_begins_with_its_canary_and_only_once():
    found = [case.name for case in choose(named("train-1b,train-8b,serve-8b,plan"), 900.0).cases]
    assert found == [
        "training-canary", "train-1b", "train-8b", "serving-canary", "serve-8b", "plan",
    ]  # fmt: skip
    tiny = choose(named("train-1b"), 900.0, canaries=False)
    assert [case.name for case in tiny.cases] == ["train-1b"]


def test_what_the_time_does_not_hold_is_left_out_and_said():
    choice = choose(of_command(SPEED), 200.0)
    assert choice.seconds <= 200.0
    assert choice.cases[1].name == "train-1b"
    assert set(choice.cases) - set(CANARIES.values()) | set(choice.left_out) == set(of_command(SPEED))
    text = str(choice)
    assert all(case.name in text for case in choice.left_out)
    assert text.count("left out: no time") == len(choice.left_out) > 0
    assert text.splitlines()[-1].split() == ["sum,", "with", "starts", f"{choice.seconds:.0f}", "s"]


def test_cases_are_named_alone_or_by_their_part():
    assert [case.name for case in named("loss, train-1b")] == ["train-1b", "loss"]
    assert {case.part for case in named("serving")} == {"serving"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("train-1", "There is no case 'train-1'. Did you mean 'train-1b'?"), (" , ", "No case is named.")],
)
def test_a_case_that_is_not_there_is_refused_with_the_nearest(text, said):
    with pytest.raises(Unfit, match=re.escape(said)):
        named(text)


def test_a_command_that_is_not_there_is_refused():
    with pytest.raises(Unfit, match=r"There is no part 'fast'\. Parts: speed, rest\."):
        of_command("fast")


def test_what_docs_limits_says_is_not_measured_has_rows_that_measure_it():
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text()
    table = page.partition("## Not measured on a GPU")[2].partition("## ")[0]
    lists = re.findall(r"\| `([\w,-]+)`", table)
    assert len(lists) >= 9
    for text in lists:
        assert named(text), text
