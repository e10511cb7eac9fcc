"""Count launches, waits and copies on a GPU that computes nothing, and hold them against their bounds.

python -m tools.null_gpu            count and file (make null-gpu); exit code 1 if a bound is broken
python -m tools.null_gpu --kit ...  run the GPU kit there, with its options (make null-gpu-kit)
python -m tools.null_gpu --check    only compare what is filed with the sources: needs no torch
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.core import clock
from penstock.core.files import write_atomic
from tools.filed import RESULTS, complaint, digests, file, newest
from tools.null_gpu.bounds import TABLE, Table, judge
from tools.null_gpu.environment import ROOT, TORCH, MissingError, python, variables
from tools.null_gpu.page import page

COUNTS, KIT = "null-gpu", "null-gpu-kit"
"""Names of results, before their date."""
SUBJECTS = (
    ("training", "plain", "compute"),
    ("training", "mixed"),
    ("training", "float8_rowwise", "float8_tensorwise"),
    ("serving",),
    ("kernels",),
    ("families",),
)
"""Programs of tools/null_gpu/subjects, each with its arguments."""
_TIMEOUT_S = 900.0
_MAX_SAID = 3000


def count(table: Table) -> int:
    """Run all programs, file what they counted; return the exit code."""
    began = clock.monotonic()
    counts: dict[str, dict[str, Any]] = {}
    failed = {}
    for name, *arguments in SUBJECTS:
        start = clock.monotonic()
        said = _run([f"tools.null_gpu.subjects.{name}", *arguments])
        if isinstance(said, str):
            failed[" ".join([name, *arguments])] = said
            print(f"{name} {' '.join(arguments)} failed:\n{said}", file=sys.stderr)
        else:
            counts |= said
        print(f"{name} {' '.join(arguments)}: {clock.monotonic() - start:.0f} s", flush=True)
    for found in counts.values():
        if "uploads" in found:
            found["pageable_uploads"] = found["uploads"] - found["pinned_uploads"]
    judged, missing = judge(table.bounds, counts)
    date = clock.utc_now()[:10]
    result = {
        "benchmark": COUNTS,
        "date": date,
        "torch": TORCH,
        "seconds": round(clock.monotonic() - began, 1),
        "failed": failed,
        "counts": counts,
        "sources": digests(ROOT, table.sources),
    }
    path = file(RESULTS, f"{COUNTS}-{date}", result, page(result, judged, missing))
    print(f"{result['seconds']:.0f} s, filed in {path}")
    return _report(table, result)


def _run(words: Sequence[str]) -> dict[str, Any] | str:
    """Return what a program counted, or why it failed."""
    try:
        done = subprocess.run(
            [python(), "-m", *words],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=variables(),
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_TIMEOUT_S:.0f} s"
    if done.returncode:
        return done.stderr[-_MAX_SAID:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _report(table: Table, result: dict[str, Any]) -> int:
    """Print broken bounds, and those that were reached; return the exit code."""
    judged, missing = judge(table.bounds, result["counts"])
    problems = [f"{what} was not counted" for what in missing]
    problems += [
        f"{one.count} of {one.of}: {one.value:,.10g}, allowed {one.allowed:,.10g} ({one.why})"
        for one in judged
        if not one.is_within
    ]
    for problem in problems:
        print(f"bound broken: {problem}", file=sys.stderr)
    return 1 if problems else 0


def check(table: Table) -> int:
    """Compare the filed results with the sources and the bounds; return the exit code."""
    problems = [
        complaint(RESULTS, name, digests(ROOT, patterns), target)
        for name, patterns, target in (
            (COUNTS, table.sources, "null-gpu"),
            (KIT, table.kit_sources, "null-gpu-kit"),
        )
    ]
    if (of_kit := newest(RESULTS, KIT)) is not None:
        problems += [f"{of_kit[0]}: {row}. Mend it, then: make null-gpu-kit." for row in crashes(of_kit[1])]
    for problem in filter(None, problems):
        print(problem, file=sys.stderr)
    found = newest(RESULTS, COUNTS)
    return 1 if any(problems) or found is None else _report(table, found[1])


def crashes(result: Mapping[str, Any]) -> list[str]:
    """Return the rows of the GPU kit that failed, each with its reason.

    >>> crashes({"parts": {"serving": {"rows": [{"name": "a", "status": "failed", "why": "no b"}]}}})
    ['a failed: no b']
    """
    rows = [row for part in result["parts"].values() for row in part["rows"]]
    return [f"{row['name']} failed: {row['why']}" for row in rows if row["status"] == "failed"]


def kit(table: Table, arguments: Sequence[str]) -> int:
    """Run the GPU kit under the null GPU; return its exit code.

    The whole kit, run at once to its end, notes its sources in the result, so that `--check` knows when they
    changed. Rows that failed stand in the result.
    """
    sources = digests(ROOT, table.kit_sources)
    command = [str(python()), str(ROOT / "benchmarks" / "gpu.py"), "--out", str(RESULTS), *arguments]
    code = subprocess.run(command, check=False, cwd=ROOT, env=variables()).returncode
    found = newest(RESULTS, KIT)
    is_whole = found is not None and bool(found[1]["is_finished"])
    if found is not None and is_whole and not {"--rows", "--part", "--resume"} & {*arguments}:
        write_atomic(found[0], json.dumps({**found[1], "sources": sources}, indent=1) + "\n")
    return code


def main() -> int:
    """Run as the options say; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare what is filed with the sources")
    parser.add_argument("--kit", action="store_true", help="run the GPU kit; other options are the kit's")
    options, others = parser.parse_known_args()
    table = Table.read(TABLE.read_text())
    try:
        if options.kit:
            return kit(table, others)
        return check(table) if options.check else count(table)
    except MissingError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
