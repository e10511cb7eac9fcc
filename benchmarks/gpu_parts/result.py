"""The result of the GPU kit: JSON that grows while parts run, its page and its plots."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_parts.page import page, plots
from gpu_parts.part import DONE, as_json
from gpu_parts.unfit import Unfit
from penstock.core import clock
from penstock.core.files import write_atomic

NOT_A_GPU = "NOTHING WAS MEASURED ON A GPU: THIS RUN ONLY SHOWS THAT THE CODE RUNS ON A CPU."
NULL_GPU = "NOTHING WAS MEASURED OR COMPUTED: THIS RUN ONLY SHOWS THAT THE CODE RUNS ON A NULL GPU."
TINY = "NOTHING WAS MEASURED: SHAPES ARE TINY, THIS RUN ONLY SHOWS THAT THE CODE RUNS."
_ADDED_WITHIN_S = 86400.0


class Result:
    """What is known of one machine; `found` is its JSON value.

    Args:
        stem: path of its files, without a suffix.
    """

    def __init__(self, stem: Path, found: dict[str, Any]) -> None:
        self.stem, self.found = stem, found

    @classmethod
    def open(
        cls, out: Path, *, machine: Mapping[str, Any], device: str, size: str, is_added: bool
    ) -> "Result":
        """Return a new result, or the newest of this day in a folder, to add to.

        Raises:
            Unfit: the result to add to is another machine's.
        """
        is_null = machine.get("is_null", False)
        prefix = ("gpu" if size == "full" else "gpu-tiny") if is_gpu(device) else "not-a-gpu"
        prefix = "null-gpu-kit" if is_null else prefix
        date = clock.utc_now()[:10]
        earlier = sorted(out.glob(f"{prefix}-????-??-??.json")) if is_added else []
        if not earlier or clock.unix_seconds() - earlier[-1].stat().st_mtime > _ADDED_WITHIN_S:
            stem = out / f"{prefix}-{date}"
            stem.with_suffix(".log").unlink(missing_ok=True)
            return cls(
                stem,
                {
                    "benchmark": "gpu",
                    "date": date,
                    "is_gpu": is_gpu(device) and not is_null,
                    "warning": NULL_GPU if is_null else warning(device, size),
                    "device": device,
                    "size": size,
                    "machine": {key: value for key, value in machine.items() if key != "versions"},
                    "versions": machine["versions"],
                    "is_finished": False,
                    "left_out": [],
                    "parts": {},
                },
            )
        found = json.loads(earlier[-1].read_text())
        for key, now, then in (
            ("GPU", machine["name"], found["machine"]["name"]),
            ("torch", machine["versions"].get("torch"), found["versions"].get("torch")),
            ("size", size, found["size"]),
        ):
            if now != then:
                raise Unfit(f"{earlier[-1]} is of another {key} ({then}, now {now}). Name another --out.")
        found.pop("stopped_by", None)
        return cls(earlier[-1].with_suffix(""), {**found, "is_finished": False})

    def part(self, name: str) -> dict[str, Any]:
        """Return what is known of a part."""
        new = {
            "ended": "was not run", "is_done": False, "seconds": 0.0, "budget_s": 0.0, "expected": [],
            "rows": [], "others": "", "cases": {},
        }  # fmt: skip
        entry: dict[str, Any] = self.found["parts"].setdefault(name, new)
        entry.setdefault("cases", {})  # results before 2026-11-28 have none
        return entry

    def has_done(self, part: str, case: str) -> bool:
        """True if a case ran to its end."""
        cases = self.found["parts"].get(part, {}).get("cases", {})
        return bool(cases.get(case, {}).get("ended") == DONE)

    def take(self, part: str, said: Mapping[str, Any], earlier: Sequence[dict[str, Any]]) -> None:
        """Put in what a part's process has filed so far, in the place of what its cases filed before.

        Args:
            said: the JSON of the part's file.
            earlier: rows of the part before this process.
        """
        entry = self.part(part)
        entry["rows"] = merged(earlier, said["rows"])
        for name, case in said.get("cases", {}).items():
            entry["cases"][name] = {**entry["cases"].get(name, {}), **case}
        by_case = [name for case in entry["cases"].values() for name in case.get("expected", [])]
        entry["expected"] = by_case or said["expected"]

    def end(self, part: str, case: str, ended: str, **about: Any) -> None:
        """Note how a case ended, and with that how its part stands."""
        entry = self.part(part)
        entry["cases"][case] = {**entry["cases"].get(case, {}), "ended": ended, **about}
        bad = [f"{one}: {is_['ended']}" for one, is_ in entry["cases"].items() if is_["ended"] != DONE]
        entry.update(is_done=not bad, ended="; ".join(bad) or DONE)

    def file_numbers(self) -> None:
        """Write the JSON."""
        write_atomic(self.stem.with_suffix(".json"), as_json(self.found))

    def file(self) -> None:
        """Write the JSON, the page and the plots."""
        self.file_numbers()
        drawn = plots(self.found)
        names = {name: f"{self.stem.name}-{name}.svg" for name in drawn}
        for name, svg in drawn.items():
            self.stem.with_name(names[name]).write_text(svg)
        write_atomic(self.stem.with_suffix(".md"), page(self.found, names))


def merged(earlier: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of which the new ones take the place of those of their cases and of their names.

    >>> old = [{"name": "a", "case": "x"}, {"name": "b", "case": "x"}, {"name": "c"}, {"name": "d"}]
    >>> [row["name"] for row in merged(old, [{"name": "b", "case": "x"}, {"name": "c", "case": "y"}])]
    ['d', 'b', 'c']
    """
    names, cases = {row["name"] for row in new}, {row.get("case") for row in new} - {None, ""}
    kept = [row for row in earlier if row["name"] not in names and row.get("case") not in cases]
    return [*kept, *new]


def is_gpu(device: str) -> bool:
    """True if what is measured on a device counts as a GPU's."""
    return not device.startswith("cpu")


def warning(device: str, size: str) -> str:
    """Return what must be said of every figure, in capital letters; empty if figures are what they seem.

    >>> warning("cuda", "full"), warning("cpu", "tiny")[:34]
    ('', 'NOTHING WAS MEASURED ON A GPU: THI')
    """
    if not is_gpu(device):
        return NOT_A_GPU
    return TINY if size == "tiny" else ""
