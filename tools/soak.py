"""Run what `make test` leaves out for its length: scale, repetition, and parts that need downloads.

python -m tools.soak            every part (make soak), one after another
python -m tools.soak PART ...   some parts
python -m tools.soak --check    only compare what is filed with the sources

Parts, their tests and their sources stand in soak.toml. Each part files its result as JSON in
benchmarks/results; `--check` fails where a result is older than a source of its part.
"""

import argparse
import os
import platform
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from penstock.core import clock
from tools.filed import RESULTS, complaint, digests, file

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "soak.toml"
_MAX_NAMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What runs together, alone."""

    name: str
    why: str
    tests: tuple[str, ...]
    """Words for pytest."""
    sources: tuple[str, ...]
    """Patterns of the files whose change makes the result too old; the tests are among them."""
    profile: str = "default"
    """Of hypothesis."""

    @property
    def result(self) -> str:
        """Name of its filed results, before their date."""
        return f"soak-{self.name}"

    def digests(self) -> dict[str, str]:
        """Return path -> digest of its sources."""
        return digests(ROOT, self.sources)


def without_make(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a `make` that a test starts does not get the settings of this one.

    >>> without_make({"PATH": "/bin", "MAKEFLAGS": " -- PART=kit", "PART": "kit"})
    {'PATH': '/bin'}
    """
    ours = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PART")
    return {name: value for name, value in environment.items() if name not in ours}


def parts_of(text: str) -> list[Part]:
    """Return the parts that a soak.toml describes."""
    return [
        Part(
            name=name,
            why=found["why"],
            tests=tuple(found["tests"]),
            sources=tuple(found["sources"]),
            profile=found.get("profile", "default"),
        )
        for name, found in tomllib.loads(text).items()
    ]


def run(part: Part) -> bool:
    """Run a part and file its result; return whether every test of it passed, and none was skipped."""
    print(f"{part.name}: {part.why}", flush=True)
    sources, began = part.digests(), clock.monotonic()
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", "2", f"--junitxml={report}", *part.tests]
        profile = {"HYPOTHESIS_PROFILE": part.profile}
        subprocess.run(command, check=False, cwd=ROOT, env={**without_make(os.environ), **profile})
        count, not_passed = outcome(report.read_text()) if report.exists() else (0, [])
    result = {
        "benchmark": part.result,
        "date": clock.utc_now()[:10],
        "machine": {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine()},
        "seconds": round(clock.monotonic() - began, 1),
        "tests": count,
        "sources": sources,
    }
    if not_passed or not count:
        named = ", ".join(not_passed[:_MAX_NAMED]) or "there are none"
        print(f"{part.name}: not filed; these did not pass: {named}")
        return False
    path = file(RESULTS, f"{part.result}-{result['date']}", result)
    print(f"{part.name}: {count} tests in {result['seconds']:.0f} s, filed in {path}", flush=True)
    return True


def outcome(report: str) -> tuple[int, list[str]]:
    """Return how many tests a report of pytest has, and the names of those that failed or were skipped.

    >>> outcome('<testsuite><testcase name="a"/><testcase name="b"><skipped/></testcase></testsuite>')
    (2, ['b'])
    """
    cases = list(ET.fromstring(report).iter("testcase"))
    return len(cases), sorted(case.get("name", "") for case in cases if _is_bad(case))


def _is_bad(case: ET.Element) -> bool:
    return any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))


def check(parts: list[Part]) -> int:
    """Compare the filed results with the sources; return the exit code."""
    problems = [complaint(RESULTS, part.result, part.digests(), f"soak PART={part.name}") for part in parts]
    for problem in filter(None, problems):
        print(problem, file=sys.stderr)
    return 1 if any(problems) else 0


def main() -> int:
    """Run as the options say; return the exit code."""
    parts = parts_of(TABLE.read_text())
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", choices=[[], *(part.name for part in parts)], help="default: all")
    parser.add_argument("--check", action="store_true", help="only compare what is filed with the sources")
    options = parser.parse_args()
    if options.check:
        return check(parts)
    passed = [run(part) for part in parts if not options.part or part.name in options.part]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
