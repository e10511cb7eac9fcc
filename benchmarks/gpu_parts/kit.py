"""The frame of the GPU kit: runs parts in turn, files what they say as they say it, and judges it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts.child import run_child
from gpu_parts.environment import ROOT, environment
from gpu_parts.machine import others, usage
from gpu_parts.page import page, plots
from gpu_parts.parts import PartScript, budget_s
from gpu_parts.stopping import Stopped, not_stopped
from gpu_parts.unfit import Unfit
from gpu_parts.verdict import judge
from penstock.core import clock
from penstock.core.files import write_atomic

NOT_A_GPU = "NOTHING WAS MEASURED ON A GPU: THIS RUN ONLY SHOWS THAT THE CODE RUNS ON A CPU."
TINY = "NOTHING WAS MEASURED: SHAPES ARE TINY, THIS RUN ONLY SHOWS THAT THE CODE RUNS."
_LAST_BYTES, _LAST_LINES = 2000, 4
_RESERVE_S = 8.0
"""Kept of the total for killing the last part and for the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """One run of some parts."""

    parts: tuple[PartScript, ...]
    """The most important first."""
    machine: dict[str, Any]
    """What `probe` found."""
    out: Path
    device: str
    size: str
    total_s: float
    is_added: bool = False
    """True if the parts are added to the newest result of this device in `out`, where there is one."""
    grace_s: float = 4.0
    """Time after a part's budget until it is killed."""

    def run(self) -> int:
        """Run the parts; return the exit code: 0 if every equality held, 1 if not, 128 + signal if stopped.

        Raises:
            Unfit: the result to add to is another machine's.
        """
        deadline = clock.monotonic() + self.total_s
        print(f"{self.machine['name']}, torch {self.machine['versions'].get('torch')}", flush=True)
        self.out.mkdir(parents=True, exist_ok=True)
        result, stem = self._begin()
        code = None
        with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder, operators_under_construction():
            for name, entry in result["parts"].items():  # which later parts may read
                (Path(folder) / f"{name}.json").write_text(json.dumps(entry))
            try:
                for number in range(len(self.parts)):
                    self._run_part(self.parts[number:], result, stem, deadline, Path(folder))
                result["is_finished"] = True
            except Stopped as stopped:
                code = stopped.exit_code
                result["stopped_by"] = str(stopped)
            with not_stopped():
                self._file(result, stem)
        verdict = judge(result)
        print(f"\nequalities: {verdict}")
        for what, names in (("failed", verdict.failed), ("not reached", verdict.not_reached)):
            for name in names:
                print(f"  {what}: {name}")
        print(f"filed in {stem}.json, {stem.name}.md says it in words")
        return code if code is not None else 0 if verdict.is_proven else 1

    def _run_part(
        self,
        parts: tuple[PartScript, ...],
        result: dict[str, Any],
        stem: Path,
        deadline: float,
        folder: Path,
    ) -> None:
        """Run the first of these parts for its share of the time left."""
        part = parts[0]
        left = deadline - clock.monotonic() - _RESERVE_S
        budget = budget_s(parts, left) - self.grace_s
        if budget <= 0:
            print(f"{part.name}: not reached, the time is over", flush=True)
            result["parts"].setdefault(part.name, _nothing_yet("was not reached: the time was over"))
            return
        before = usage() if is_gpu(self.device) else {}
        about = {
            "began": clock.utc_now(),
            "revision": _revision(),
            "budget_s": round(budget, 1),
            "gpu_before": before,
            "others": others(before),
        }
        entry = result["parts"][part.name] = {**_nothing_yet("runs"), **about}
        rows, log = folder / f"{part.name}.json", stem.with_suffix(".log")
        rows.unlink(missing_ok=True)
        print(f"\n{part.name}: at most {budget:.0f} s. {entry['others']}".rstrip(), flush=True)
        log.touch()
        filed, shown = _Changes(rows), _Tail(log)

        def meanwhile() -> None:
            shown.show()
            if filed.has_changed():
                entry.update(_read(rows))
                self._file_numbers(result, stem)

        began, failed = clock.monotonic(), "was stopped"
        try:
            command = [sys.executable, str(part.path), "--device", self.device, "--size", self.size]
            failed = run_child(
                [*command, "--budget-s", f"{budget:.1f}", "--out", str(rows)],
                seconds=budget + self.grace_s,
                log=log,
                environment=environment(is_tiny=self.size == "tiny"),
                meanwhile=meanwhile,
            )
        finally:
            entry.update(_read(rows))
            if not failed and not entry["is_done"]:
                failed = "ended before its rows did"
            entry.update(seconds=round(clock.monotonic() - began, 1), ended=failed or "done")
        shown.show()
        if failed:
            entry["last_words"] = shown.last_lines()
        print(f"{part.name}: {entry['ended']}, {entry['seconds']:.0f} s", flush=True)
        self._file(result, stem)

    def _begin(self) -> tuple[dict[str, Any], Path]:
        """Return the result that parts are put into, and its path without a suffix."""
        prefix = ("gpu" if self.size == "full" else "gpu-tiny") if is_gpu(self.device) else "not-a-gpu"
        date = clock.utc_now()[:10]
        new = {
            "benchmark": "gpu",
            "date": date,
            "is_gpu": is_gpu(self.device),
            "warning": warning(self.device, self.size),
            "device": self.device,
            "size": self.size,
            "machine": {key: value for key, value in self.machine.items() if key != "versions"},
            "versions": self.machine["versions"],
            "is_finished": False,
            "parts": {},
        }
        earlier = sorted(self.out.glob(f"{prefix}-????-??-??.json")) if self.is_added else []
        if not earlier:
            stem = self.out / f"{prefix}-{date}"
            stem.with_suffix(".log").unlink(missing_ok=True)
            return new, stem
        found = json.loads(earlier[-1].read_text())
        for key, now, then in (
            ("GPU", self.machine["name"], found["machine"]["name"]),
            ("torch", self.machine["versions"].get("torch"), found["versions"].get("torch")),
            ("size", self.size, found["size"]),
        ):
            if now != then:
                raise Unfit(f"{earlier[-1]} is of another {key} ({then}, now {now}). Name another --out.")
        found.pop("stopped_by", None)
        return {**found, "is_finished": False}, earlier[-1].with_suffix("")

    def _file(self, result: dict[str, Any], stem: Path) -> None:
        self._file_numbers(result, stem)
        drawn = plots(result)
        for name, svg in drawn.items():
            stem.with_name(f"{stem.name}-{name}.svg").write_text(svg)
        write_atomic(
            stem.with_suffix(".md"), page(result, {name: f"{stem.name}-{name}.svg" for name in drawn})
        )

    def _file_numbers(self, result: dict[str, Any], stem: Path) -> None:
        write_atomic(stem.with_suffix(".json"), json.dumps(result, indent=1) + "\n")


@contextlib.contextmanager
def operators_under_construction() -> Iterator[None]:
    """Build the C++ operators for CPUs in a process beside the parts, which takes a minute on a bare machine.

    Equalities that compare with the CPU wait for this one build. Without it, each process that needs the
    operators would begin a build, and lose it when its time is over.
    """
    builder = subprocess.Popen(
        [sys.executable, "-m", "penstock.nn.native"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.killpg(builder.pid, signal.SIGKILL)
        builder.wait()


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


def _nothing_yet(ended: str) -> dict[str, Any]:
    return {"ended": ended, "is_done": False, "seconds": 0.0, "expected": [], "rows": [], "others": ""}


def _read(rows: Path) -> dict[str, Any]:
    """Return what a part filed so far; nothing if it has filed nothing."""
    if not rows.exists():
        return {}
    found = json.loads(rows.read_text())
    return {key: found[key] for key in ("rows", "expected", "is_done")}


def _revision() -> str | None:
    """Return the checkout's commit, marked if files differ from it; None if there is no git."""
    try:
        said = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return said.stdout.strip()


class _Changes:
    """Tells when a file was replaced."""

    def __init__(self, path: Path) -> None:
        self._path, self._seen = path, 0

    def has_changed(self) -> bool:
        seen = self._path.stat().st_mtime_ns if self._path.exists() else 0
        self._seen, before = seen, self._seen
        return seen != before


class _Tail:
    """Prints what a log gains from now on."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, path.stat().st_size
        self._began = self._at

    def last_lines(self) -> str:
        """Return the last words since the beginning, one paragraph."""
        with self._path.open("rb") as file:
            file.seek(max(self._began, self._path.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return " ".join(line.strip() for line in lines[-_LAST_LINES:])

    def show(self) -> None:
        with self._path.open("rb") as file:
            file.seek(self._at)
            text = file.read()
        self._at += len(text)
        print(text.decode(errors="replace"), end="", flush=True)
