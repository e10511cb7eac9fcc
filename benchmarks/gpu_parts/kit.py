"""The frame of the GPU kit: runs cases in turn, files what they say as they say it, and judges it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_parts.cases import RESERVE_S, START_S, Case, in_parts
from gpu_parts.child import run_child
from gpu_parts.environment import ROOT, environment
from gpu_parts.machine import others, usage
from gpu_parts.part import DONE, RUNS, as_json
from gpu_parts.result import Result, is_gpu
from gpu_parts.stopping import Stopped, not_stopped
from gpu_parts.verdict import EQUALITIES, judge
from penstock.core import clock

_LAST_BYTES, _LAST_LINES = 2000, 4


class _OverTime(Exception):
    """The running case took longer than its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kit:
    """One run of some cases."""

    cases: tuple[Case, ...]
    """In the order in which they run."""
    result: Result
    device: str
    size: str
    total_s: float
    scripts: Path = Path(__file__).parent
    """The folder of the parts' scripts."""
    start_s: float = START_S
    """Kept for the start of each part's process."""
    grace_s: float = 4.0
    """Time after a case's own until its process is killed."""

    def run(self) -> int:
        """Run the cases; return the exit code: 0: every equality held, 1: not, 128 + signal: stopped.

        On the null GPU 0 says that all cases ran and no row failed.
        """
        deadline = clock.monotonic() + self.total_s
        found, stem, code = self.result.found, self.result.stem, None
        print(f"{found['machine']['name']}, torch {found['versions'].get('torch')}", flush=True)
        stem.parent.mkdir(parents=True, exist_ok=True)
        groups = in_parts(self.cases)
        builds = operators_under_construction if EQUALITIES in dict(groups) else contextlib.nullcontext
        with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder, builds():
            try:
                for number, (part, cases) in enumerate(groups):
                    later_s = sum(
                        self.start_s + sum(case.budget_s for case in group)
                        for _, group in groups[number + 1 :]
                    )
                    self._run_part(part, cases, deadline - RESERVE_S - later_s, Path(folder))
                found["is_finished"] = True
            except Stopped as stopped:
                code = stopped.exit_code
                found["stopped_by"] = str(stopped)
            with not_stopped():
                self.result.file()
        verdict = judge(found)
        print(f"\nequalities: {verdict}")
        for what, names in (("failed", verdict.failed), ("not reached", verdict.not_reached)):
            for name in names:
                print(f"  {what}: {name}")
        for name in found.get("left_out", []):
            print(f"  left out, no time: {name}")
        print(f"filed in {stem}.json, {stem.name}.md says it in words")
        if code is not None:
            return code
        return 0 if verdict.is_proven or (self.is_null and _all_ran(found)) else 1

    @property
    def is_null(self) -> bool:
        """True if nothing is computed: the kit proves only that all of its code runs."""
        return bool(self.result.found["machine"].get("is_null"))

    def _run_part(self, part: str, cases: Sequence[Case], deadline: float, folder: Path) -> None:
        """Run cases of one part in one process, and in another what is left where a case ends its process."""
        before = usage() if is_gpu(self.device) else {}
        entry = self.result.part(part)
        entry.update(
            began=clock.utc_now(),
            revision=_revision(),
            budget_s=round(deadline - clock.monotonic(), 1),
            gpu_before=before,
            others=others(before),
        )
        for name, other in self.result.found["parts"].items():  # which later parts may read
            (folder / f"{name}.json").write_text(as_json(other))
        print(f"\n{part}: {', '.join(case.name for case in cases)}. {entry['others']}".rstrip(), flush=True)
        began, left = clock.monotonic(), list(cases)
        while left:
            until = self._times(left, deadline)
            for case in [case for case in left if until[case.name] <= 0]:
                left.remove(case)
                self._end(part, case.name, "was not reached: the time was over")
            if left:
                left = self._run_process(part, left, until, folder)
        entry["seconds"] = round(clock.monotonic() - began, 1)
        print(f"{part}: {entry['ended']}, {entry['seconds']:.0f} s", flush=True)
        self.result.file()

    def _times(self, cases: Sequence[Case], deadline: float) -> dict[str, float]:
        """Return in how many seconds each case must have ended, so that the later ones have theirs."""
        left_s, found = deadline - clock.monotonic() - self.grace_s, dict[str, float]()
        for case in reversed(cases):
            found[case.name] = left_s
            left_s -= case.budget_s
        return found

    def _run_process(
        self, part: str, cases: list[Case], until: Mapping[str, float], folder: Path
    ) -> list[Case]:
        """Run cases in one process; return those that are still to run."""
        log = self.result.stem.with_suffix(".log")
        log.touch()
        said, shown, earlier = _Said(folder / f"{part}.json"), _Tail(log), self.result.part(part)["rows"]
        began = clock.monotonic()

        def meanwhile() -> None:
            shown.show()
            if said.has_changed():
                self.result.take(part, said.found, earlier)
                self.result.file_numbers()
            if clock.monotonic() - began > until[said.left(cases)[0].name] + self.grace_s:
                raise _OverTime

        last_s = until[cases[-1].name]
        command = [sys.executable, str(self.scripts / f"{part}.py"), "--device", self.device]
        command += ["--size", self.size, "--budget-s", f"{last_s:.1f}", "--out", str(said.path)]
        for case in cases:
            command += ["--case", f"{case.name}:{until[case.name]:.1f}"]
        failed = "was stopped"
        try:
            failed = run_child(
                command,
                seconds=last_s + 2 * self.grace_s,
                log=log,
                environment=environment(is_tiny=self.size == "tiny"),
                meanwhile=meanwhile,
            )
        except _OverTime:
            failed = f"was killed after {clock.monotonic() - began:.0f} s"
        finally:
            said.has_changed()
            if said.found:  # also where a signal came between the reading of rows and their taking
                self.result.take(part, said.found, earlier)
            shown.show()
            ended = said.ended(cases, failed or "ended before its rows did")
            if any(how != DONE for how in ended.values()):
                self.result.part(part)["last_words"] = shown.last_lines()
            for name, how in ended.items():
                self._end(part, name, how)
            for trace in folder.glob("*.trace.json.gz"):
                shutil.copyfile(trace, log.with_name(f"{log.stem}-{trace.name}"))
        return [case for case in cases if case.name not in ended]

    def _end(self, part: str, case: str, ended: str) -> None:
        self.result.end(part, case, ended, at=clock.utc_now(), revision=_revision())
        print(f"{part}: {case}: {ended}", flush=True)


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


def _all_ran(found: Mapping[str, Any]) -> bool:
    """True if every case of every part ran to its end and no row failed."""
    parts = found["parts"].values()
    rows = [row for part in parts for row in part["rows"]]
    return all(part["is_done"] for part in parts) and all(row["status"] != "failed" for row in rows)


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


class _Said:
    """What the process of a part has filed so far: the JSON of `part.Part`."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, dict[str, Any]()
        self._seen = 0
        path.unlink(missing_ok=True)

    def has_changed(self) -> bool:
        """Read the file; return True if it is another than before."""
        seen = self.path.stat().st_mtime_ns if self.path.exists() else 0
        if seen == self._seen:
            return False
        self.found = json.loads(self.path.read_text())
        self._seen = seen
        return True

    def left(self, cases: Sequence[Case]) -> list[Case]:
        """Return the cases that have not ended, first the one that runs; the last if all have."""
        known = self._ended()
        return [case for case in cases if case.name not in known] or [cases[-1]]

    def ended(self, cases: Sequence[Case], failed: str) -> dict[str, str]:
        """Return how cases ended, now that the process has; those that never began are not there.

        Args:
            failed: how the one ended that ran when the process did.
        """
        known = self._ended()
        if self.found.get("is_done"):
            return dict.fromkeys((case.name for case in cases), DONE) | known
        return known | {self.left(cases)[0].name: failed}

    def _ended(self) -> dict[str, str]:
        cases = self.found.get("cases", {})
        return {name: case["ended"] for name, case in cases.items() if case["ended"] != RUNS}


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
