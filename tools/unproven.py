"""Write what never ran on its hardware into docs/limits.md, and what did into docs/results.md.

The features are in benchmarks/data/unproven.toml. For each, the newest result of the GPU kit that has its
rows (benchmarks/results/gpu-DATE.json) decides between "never" and a date. Run as
`python -m tools.unproven`; `--check` only compares.
"""

import ast
import json
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.size import code_lines, is_code

ROOT = Path(__file__).parent.parent
BEGIN = "<!-- begin: written by tools/unproven.py -->"
END = "<!-- end: written by tools/unproven.py -->"
NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """A row of unproven.toml."""

    what: str
    hardware: str
    files: tuple[str, ...]
    proof: tuple[str, ...]
    figure: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The rows of one run of the kit by `part: name`, and where it ran."""

    rows: Mapping[str, Mapping[str, Any]]  # Any: JSON
    about: str


def features_of(text: str) -> list[Feature]:
    """Read the table.

    Raises:
        TypeError: a key is unknown or missing.
    """
    rows: list[dict[str, Any]] = tomllib.loads(text)["feature"]  # Any: a text or a list of texts
    return [Feature(**{**row, "files": tuple(row["files"]), "proof": tuple(row["proof"])}) for row in rows]


def results_in(folder: Path) -> list[Result]:
    """Return the results of the kit in full size on GPUs, the newest first."""
    paths = sorted(folder.glob("gpu-????-??-??.json"), reverse=True)
    all_found = [json.loads(path.read_text()) for path in paths]
    return [
        Result(rows_of(found["parts"]), f"{found['date']}, {found['machine']['name']}")
        for found in all_found
        if found["is_gpu"] and found["size"] == "full"
    ]


def rows_of(parts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the rows of all parts by `part: name`."""
    return {f"{part}: {row['name']}": row for part, found in parts.items() for row in found["rows"]}


def matching(pattern: str, rows: Mapping[str, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows whose name a pattern matches; * stands for anything.

    >>> [row["status"] for row in matching("a: *[1]", {"a: x [1]": {"status": "held"}, "b: x [1]": {}})]
    ['held']
    """
    wanted = re.compile(".*".join(map(re.escape, pattern.split("*"))))
    return [row for name, row in rows.items() if wanted.fullmatch(name)]


def last_run(feature: Feature, results: Sequence[Result]) -> str:
    """Say when a feature ran last and what came of it: that all held, how many did not, or never.

    Args:
        results: the newest first.
    """
    said = (_run_in(result, feature) for result in results if feature.proof)
    return next((one for one in said if one != NEVER), NEVER)


def _run_in(result: Result, feature: Feature) -> str:
    """Say what came of a feature in one result.

    Rows that were skipped did not run; if those of the first proof did not, the feature did not.
    """
    found = [matching(pattern, result.rows) for pattern in feature.proof]
    ran = [[row for row in rows if row["status"] != "skipped"] for rows in found]
    if not ran[0]:
        return NEVER
    num_ran, num_missing = sum(map(len, ran)), sum(not rows for rows in ran)
    num_failed = sum(row["status"] == "failed" for rows in ran for row in rows)
    said = f"{num_failed} of {num_ran} failed" if num_failed else f"{num_ran} held"
    return f"{result.about}: {said}" + (f", {num_missing} not run" if num_missing else "")


def figure_of(feature: Feature, results: Sequence[Result]) -> str:
    """Return the newest measured value of the row that shows a feature, and where; empty for none."""
    for result in results if feature.figure else ():
        rows = [row for row in matching(feature.figure, result.rows) if row["status"] == "measured"]
        if rows:
            return f"{rows[0]['value']:.3g} {rows[0]['unit']} ({rows[0]['name']}; {result.about})"
    return ""


def lines_of(where: str, sources: Path) -> int:
    """Return the lines of code of a file, of a folder, or of one name in a file (`path::name`).

    Raises:
        SystemExit: there is no such file or name.
    """
    name, _, inner = where.partition("::")
    path = sources / name
    if path.is_dir():
        return sum(code_lines(file, file.read_text()) for file in path.rglob("*") if is_code(file))
    text = path.read_text() if path.is_file() else ""
    if text and not inner:
        return code_lines(path, text)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == inner:
            own = text.splitlines()[node.lineno - 1 : node.end_lineno]
            return code_lines(path, "\n".join(own) + "\n")
    raise SystemExit(f"benchmarks/data/unproven.toml names {where}, which is not there: correct it")


def rounded(count: int) -> int:
    """Return two digits of a count: the page should not change with every line of code.

    >>> rounded(7), rounded(239), rounded(2356)
    (7, 240, 2400)
    """
    return round(count, 2 - len(str(count)))


def never_section(features: Sequence[Feature], results: Sequence[Result]) -> str:
    """Return the part of docs/limits.md between the marks: the features that never ran."""
    never = [feature for feature in features if last_run(feature, results) == NEVER]
    lines = [
        "## Never run on the hardware it is for",
        "",
        f"{len(never)} of {len(features)} features never ran on the hardware they are for. They are",
        "type-checked, and tested as far as a CPU can.",
        "The others are in [results](results.md#features-that-ran-on-a-gpu).",
        "",
        "| feature | needs |",
        "|---|---|",
    ]
    for feature in never:
        kit = "" if feature.proof else "; `make gpu` does not test it"
        lines.append(f"| {described(feature)} | {feature.hardware}{kit} |")
    return "\n".join(lines) + "\n"


def ran_section(features: Sequence[Feature], results: Sequence[Result], sources: Path) -> str:
    """Return the part of docs/results.md between the marks: features that ran, the last run, a figure."""
    lines = [
        "## Features that ran on a GPU",
        "",
        "`make gpu` proves these on one GPU. The table shows the newest result that has a feature's rows,",
        "and rounded lines of code.",
        "",
        "| feature | needs | lines | last run | figure |",
        "|---|---|---|---|---|",
    ]
    for feature in features:
        if (ran := last_run(feature, results)) != NEVER:
            size = rounded(sum(lines_of(where, sources) for where in feature.files))
            figure = figure_of(feature, results)
            lines.append(f"| {described(feature)} | {feature.hardware} | {size:,} | {ran} | {figure} |")
    return "\n".join(lines) + "\n"


def described(feature: Feature) -> str:
    """Return what a feature is, and what else is to be known of it."""
    return f"{feature.what}. {feature.why}" if feature.why else feature.what


def replaced(page: str, new: str) -> str:
    """Return a page with the text between the marks replaced.

    >>> replaced(f"a\\n{BEGIN}\\nold\\n{END}\\nb\\n", "new\\n") == f"a\\n{BEGIN}\\n\\nnew\\n\\n{END}\\nb\\n"
    True
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"the page lacks the lines {BEGIN!r} and {END!r}: put them back")
    return f"{before}{BEGIN}\n\n{new}\n{END}{after}"


def main() -> int:
    """Write or check the pages."""
    features = features_of((ROOT / "benchmarks" / "data" / "unproven.toml").read_text())
    results = results_in(ROOT / "benchmarks" / "results")
    parts = {
        "docs/limits.md": never_section(features, results),
        "docs/results.md": ran_section(features, results, ROOT / "src" / "penstock"),
    }
    pages = {name: replaced((ROOT / name).read_text(), part) for name, part in parts.items()}
    changed = [name for name, page in pages.items() if (ROOT / name).read_text() != page]
    for name in changed:
        if "--check" in sys.argv:
            print(f"{name} is out of date: run `make format`")
        else:
            (ROOT / name).write_text(pages[name])
    return int("--check" in sys.argv and bool(changed))


if __name__ == "__main__":
    sys.exit(main())
