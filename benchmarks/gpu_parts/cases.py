"""What the GPU kit measures: cases in order of value, each with its time, and the choice among them.

A case is what `make gpu ROWS=` names: rows that are measured together, by one part. Two commands cover all
cases from an empty cache: `PART=speed`, then `PART=rest`. The planner runs in both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby

from gpu_parts.unfit import Unfit

SPEED, REST = "speed", "rest"
COMMANDS = (SPEED, REST)
COMMAND_S = 540.0
"""Seconds of one command, all included."""
PROBE_S, RESERVE_S = 12.0, 8.0
"""To look at the machine; to end the last part and to write the page."""
START_S = 8.0
"""To start the process of a part: imports, the device's context."""


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that are measured together."""

    name: str
    """Such as `train-1b`."""
    part: str
    """The script of `gpu_parts` that measures it."""
    budget_s: float
    """Seconds that it takes on an H100 from an empty cache. What earlier cases saved comes on top."""
    commands: tuple[str, ...]
    """Those that run it; none: it runs where it is named."""


CANARIES = {
    part: Case(f"{part}-canary", part, 4.0, ()) for part in ("training", "tuning", "serving", "kernels")
}
"""The whole path of a part in tiny shapes, which runs before its first case."""
CASES = (
    Case("train-1b", "training", 60.0, (SPEED,)),
    Case("train-8b", "training", 45.0, (SPEED,)),
    Case("train-1b-float8", "training", 30.0, (SPEED,)),
    Case("train-8b-float8", "training", 38.0, (SPEED,)),
    Case("serve-8b", "serving", 75.0, (SPEED,)),
    Case("attention", "kernels", 40.0, (SPEED,)),
    Case("loss", "kernels", 25.0, (SPEED,)),
    Case("int4", "kernels", 10.0, (SPEED,)),
    Case("float8", "kernels", 20.0, (SPEED,)),
    Case("draws", "kernels", 8.0, (SPEED,)),
    Case("pages", "kernels", 12.0, (SPEED,)),
    Case("equalities", "equalities", 85.0, (SPEED,)),
    Case("train-1b-eager", "training", 20.0, (REST,)),
    Case("train-1b-long", "training", 25.0, (REST,)),
    Case("train-1b-documents", "training", 30.0, (REST,)),
    Case("train-8b-float8-rows", "training", 30.0, (REST,)),
    Case("tune-8b", "tuning", 65.0, (REST,)),
    Case("tune-8b-int4", "tuning", 20.0, (REST,)),
    Case("serve-8b-transformers", "serving", 45.0, (REST,)),
    Case("serve-8b-eager", "serving", 30.0, ()),
    Case("serve-8b-graphs", "serving", 35.0, ()),
    Case("serve-8b-int8", "serving", 22.0, (REST,)),
    Case("serve-8b-int4", "serving", 22.0, ()),
    Case("serve-8b-float8", "serving", 22.0, (REST,)),
    Case("serve-1b", "serving", 35.0, (REST,)),
    Case("serve-8b-vllm", "serving", 2.0, (REST,)),
    Case("int8", "kernels", 15.0, (REST,)),
    Case("choice", "kernels", 12.0, ()),
    Case("equalities-others", "equalities", 70.0, (REST,)),
    Case("checkpoint-1b", "training", 35.0, (REST,)),
    Case("plan", "planner", 12.0, COMMANDS),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which cases run."""

    cases: tuple[Case, ...]
    """In the order in which they run, canaries included."""
    left_out: tuple[Case, ...]
    """Wanted, but without time."""
    seconds: float
    """The budgets of those that run, with the starts of their parts, the probe and the page."""

    def __str__(self) -> str:
        lines = [f"  {case.name:<24}{case.budget_s:5.0f} s" for case in self.cases]
        lines += [f"  {case.name:<24}  left out: no time" for case in self.left_out]
        return "\n".join([*lines, f"  {'sum, with starts':<24}{self.seconds:5.0f} s"])


def in_parts(cases: Sequence[Case]) -> list[tuple[str, tuple[Case, ...]]]:
    """Return the processes of some cases: neighbours of one part share one.

    >>> [(part, len(group)) for part, group in in_parts(CASES[:5])]
    [('training', 4), ('serving', 1)]
    """
    return [(part, tuple(group)) for part, group in groupby(cases, lambda case: case.part)]


def choose(wanted: Sequence[Case], seconds: float, *, canaries: bool = True) -> Choice:
    """Return those of some cases that fit into a time, in order of value; a smaller one may follow.

    >>> only = choose([CASES[0], CASES[4]], 150.0)
    >>> [case.name for case in only.cases], only.seconds, [case.name for case in only.left_out]
    (['training-canary', 'train-1b'], 92.0, ['serve-8b'])
    """
    taken: list[Case] = []
    for case in wanted:
        if _seconds(_with_canaries([*taken, case], canaries)) <= seconds:
            taken.append(case)
    found = _with_canaries(taken, canaries)
    return Choice(tuple(found), tuple(case for case in wanted if case not in taken), _seconds(found))


def _with_canaries(cases: Sequence[Case], canaries: bool) -> list[Case]:
    first = {part: group[0] for part, group in reversed(in_parts(cases))} if canaries else {}
    return [
        one
        for case in cases
        for one in (CANARIES.get(case.part), case)
        if one is not None and (one is case or first.get(case.part) is case)
    ]


def _seconds(cases: Sequence[Case]) -> float:
    return sum(case.budget_s for case in cases) + START_S * len(in_parts(cases)) + PROBE_S + RESERVE_S


def of_command(command: str) -> tuple[Case, ...]:
    """Return the cases of `speed` or `rest`, or of both if it is empty.

    Raises:
        Unfit: there is no such command.
    """
    if command and command not in COMMANDS:
        raise Unfit(f"There is no part {command!r}. Parts: {', '.join(COMMANDS)}.")
    return tuple(case for case in CASES if (command in case.commands if command else case.commands))


def named(text: str) -> tuple[Case, ...]:
    """Return the cases of a list such as `train-1b,serving`: names of cases or of the scripts of parts.

    Raises:
        Unfit: there is no such case, or none is named.
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    known = {case.name for case in CASES} | {case.part for case in CASES}
    for name in asked:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise Unfit(f"There is no case {name!r}.{hint} Cases: {', '.join(case.name for case in CASES)}.")
    if not asked:
        raise Unfit(f"No case is named. Cases: {', '.join(case.name for case in CASES)}.")
    return tuple(case for case in CASES if case.name in asked or case.part in asked)
