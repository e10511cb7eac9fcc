"""What a result of the GPU kit proves: which equalities held, and which did not or were not reached."""

from dataclasses import dataclass, field
from typing import Any

EQUALITIES = "equalities"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Names of equalities."""

    held: list[str]
    failed: list[str]
    skipped: list[str]
    """What this machine cannot run, such as MXFP8 before Blackwell."""
    not_reached: list[str]
    not_computed: list[str] = field(default_factory=list)
    """What ran on the null GPU."""

    @property
    def is_proven(self) -> bool:
        """True if every equality that this machine can run held."""
        return bool(self.held) and not self.failed and not self.not_reached

    def __str__(self) -> str:
        counts = {
            "held": self.held,
            "failed": self.failed,
            "not reached": self.not_reached,
            "not computed": self.not_computed,
            "skipped": self.skipped,
        }
        return ", ".join(f"{len(names)} {what}" for what, names in counts.items() if names) or "none was run"


def judge(result: dict[str, Any]) -> Verdict:
    """Return what a result's equalities come to.

    >>> part = {"rows": [{"name": "a", "status": "held"}], "expected": ["a", "b"], "is_done": False}
    >>> verdict = judge({"parts": {"equalities": part}})
    >>> str(verdict), verdict.not_reached, verdict.is_proven
    ('1 held, 1 not reached', ['b'], False)
    """
    part = result["parts"].get(EQUALITIES, {"rows": [], "expected": [], "is_done": False})
    names: dict[str, list[str]] = {"held": [], "failed": [], "skipped": [], "not computed": []}
    for row in part["rows"]:
        names[row["status"]].append(row["name"])
    seen = {row["name"] for row in part["rows"]}
    missing = [name for name in part.get("expected", []) if name not in seen]
    if not part["is_done"] and not missing:
        missing = ["whatever was to come when the part ended" if seen else "all of them"]
    return Verdict(names["held"], names["failed"], names["skipped"], missing, names["not computed"])
