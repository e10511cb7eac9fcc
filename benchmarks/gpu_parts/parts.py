"""The parts of the GPU kit, the most important first."""

from dataclasses import dataclass
from pathlib import Path

from gpu_parts.unfit import Unfit

_FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class PartScript:
    """A script with the options of `part.open_part`."""

    name: str
    weight: float
    """Its share of the time left, against the weights of the parts after it."""
    path: Path


PARTS = tuple(
    PartScript(name, weight, _FOLDER / f"{name}.py")
    for name, weight in (
        ("equalities", 40),
        ("training", 25),
        ("serving", 25),
        ("kernels", 8),
        ("planner", 2),
    )
)


def budget_s(parts: tuple[PartScript, ...], left_s: float) -> float:
    """Return the seconds of the first of these parts, so that the others get theirs by weight.

    >>> budget_s(PARTS, 500.0)
    200.0
    >>> budget_s(PARTS[-1:], 60.0)
    60.0
    """
    return left_s * parts[0].weight / sum(part.weight for part in parts)


def named(text: str) -> tuple[PartScript, ...]:
    """Return the parts of a list such as `serving,planner`, in the order in which they run.

    Raises:
        Unfit: there is no part of such a name.
    """
    asked = [name.strip() for name in text.split(",") if name.strip()]
    known = [part.name for part in PARTS]
    for name in asked:
        if name not in known:
            raise Unfit(f"There is no part {name!r}. Parts: {', '.join(known)}.")
    if not asked:
        raise Unfit(f"--only names no part. Parts: {', '.join(known)}.")
    return tuple(part for part in PARTS if part.name in asked)
