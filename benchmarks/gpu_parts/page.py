"""A result of the GPU kit as a page of text, and as plots."""

import re
from typing import Any

import drawing

from gpu_parts.cases import CASES
from gpu_parts.verdict import EQUALITIES, judge

_MET, _MISSED = 0, 1  # colours
_MAX_BARS = 40


def page(result: dict[str, Any], drawn: dict[str, str]) -> str:
    """Return Markdown.

    Args:
        drawn: part -> the file of its plot.
    """
    parts = result["parts"]
    lines = [f"# Penstock on {result['machine']['name']}, {result['date']}", ""]
    lines += [f"**{result['warning']}**", ""] if result["warning"] else []
    lines += [result["note"], ""] if "note" in result else []
    if not result["is_finished"]:
        lines += [f"Stopped before the end{_by(result)}: what is missing was not run.", ""]
    if result.get("left_out"):
        lines += [f"Left out for want of time: {', '.join(result['left_out'])}.", ""]
    lines += _machine(result)
    lines += _equalities(result)
    names = [name for name in dict.fromkeys(case.part for case in CASES) if name != EQUALITIES]
    for name in [*names, *(name for name in parts if name not in names and name != EQUALITIES)]:
        if name in parts:
            lines += _figures(name, parts[name], drawn.get(name))
        else:
            lines += [f"## {name.capitalize()}", "", "Not run.", ""]
    if result["warning"]:
        lines += [f"**{result['warning']}**", ""]
    return "\n".join(lines)


def plots(result: dict[str, Any]) -> dict[str, str]:
    """Return part -> SVG: bars of its figures by unit, missed targets in another colour."""
    found = {}
    for name, part in result["parts"].items():
        units: dict[str, list[dict[str, Any]]] = {}
        for row in part["rows"]:
            if row["status"] == "measured":
                units.setdefault(row["unit"], []).append(row)
        warning = f" - {result['warning']}" if result["warning"] else ""
        charts = [
            drawing.bars(
                f"{name}, {unit or 'numbers'}{warning}",
                [(_bar(row), row["value"], _colour(row)) for row in rows[:_MAX_BARS]],
                x_label=unit,
            )
            for unit, rows in units.items()
        ]
        if charts:
            found[name] = _column(charts)
    return found


def _by(result: dict[str, Any]) -> str:
    return f" by {result['stopped_by']}" if "stopped_by" in result else ""


def _machine(result: dict[str, Any]) -> list[str]:
    machine, host = result["machine"], result["machine"]["host"]
    facts = {"device": machine["name"]}
    if "memory_bytes" in machine:
        facts["memory"] = (
            f"{machine['memory_bytes'] / 2**30:.1f} GiB, {machine['free_bytes'] / 2**30:.1f} free before"
        )
        facts["compute capability"] = machine["compute_capability"]
        facts["driver"] = machine["driver"]
        facts["power limit"] = f"{machine['power_limit_w']} W"
    facts["CUDA of torch"] = machine["cuda"] or "none"
    facts["host"] = f"{host['cpu']}, {host['cores']} cores, {host['system']}"
    facts["versions"] = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    revisions = sorted({part.get("revision") or "unknown" for part in result["parts"].values()})
    facts["revision"] = ", ".join(revisions)
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), ""]


def _equalities(result: dict[str, Any]) -> list[str]:
    part, verdict = result["parts"].get(EQUALITIES), judge(result)
    answer = "every equality held" if verdict.is_proven else "NOT proven"
    lines = [f"## Equalities: {answer} ({verdict})", ""]
    if part is None:
        return [*lines, "They were not run.", ""]
    lines += _how_it_ended(part)
    for status, title in (("failed", "Failed"), ("skipped", "Not run on this machine")):
        rows = [row for row in part["rows"] if row["status"] == status]
        if rows:
            lines += [f"{title}:", "", *(f"- {row['name']}: {_first_line(row['why'])}" for row in rows), ""]
    if verdict.not_reached:
        lines += ["Not reached, so not held:", "", *(f"- {name}" for name in verdict.not_reached), ""]
    if verdict.held:
        lines += ["Held:", "", *(f"- {name}" for name in verdict.held), ""]
    return lines


def _figures(name: str, part: dict[str, Any], plot: str | None) -> list[str]:
    rows = [row for row in part["rows"] if row["status"] in ("measured", "held")]
    missed = [row["name"] for row in rows if row["is_met"] is False]
    lines = [f"## {name.capitalize()}", "", *_how_it_ended(part)]
    if missed:
        lines += [f"Targets missed: {len(missed)} ({'; '.join(missed)}).", ""]
    if rows and all("predicted" in row.get("more", {}) and "unit_of_both" in row["more"] for row in rows):
        lines += _predicted(rows)
    elif rows:
        lines += ["| figure | value | target | |", "|---|---:|---:|---|"]
        for row in rows:
            value = "held" if row["value"] is None else f"{row['value']:.4g} {row['unit']}".rstrip()
            target = "" if row["target"] is None else f"{row['target']:.4g}"
            met = {True: "met", False: "**missed**", None: ""}[row["is_met"]]
            lines.append(f"| {_cell(row['name'])} | {value} | {target} | {met} |")
        lines.append("")
    for status, title in (("failed", "Failed"), ("skipped", "Not run")):
        found = [row for row in part["rows"] if row["status"] == status]
        if found:
            lines += [f"{title}:", "", *(f"- {row['name']}: {_first_line(row['why'])}" for row in found), ""]
    lines += [line for row in rows if row.get("more", {}).get("kernels_count") for line in _kernels(row)]
    if plot:
        lines += [f"![{name}]({plot})", ""]
    return lines


def _predicted(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table of predictions beside what was measured."""
    lines = ["| row | predicted | measured | | off | |", "|---|---:|---:|---|---:|---|"]
    for row in rows:
        more, met = row["more"], {True: "met", False: "**missed**", None: ""}[row["is_met"]]
        said = [f"{more[name]:,.4g}" for name in ("predicted", "measured")]
        name = _cell(row["name"].removeprefix("plan "))
        lines.append(
            f"| {name} | {' | '.join(said)} | {more['unit_of_both']} | {more['signed']:+.1f}% | {met} |"
        )
    filed = ", ".join(sorted({str(row["more"].get("filed", "unknown")) for row in rows}))
    return [*lines, "", f"Predictions filed: {filed}.", ""]


def _kernels(row: dict[str, Any]) -> list[str]:
    """Return a table of a step's longest kernels: how often, and how long all of their launches took."""
    counts, times = row["more"]["kernels_count"], row["more"]["kernels_ms"]
    lines = [f"<details><summary>{row['name']}: kernels of a step</summary>", ""]
    lines += ["| kernel | launches | ms |", "|---|---:|---:|"]
    lines += [f"| `{_cell(name)}` | {counts[name]:.4g} | {ms:.3f} |" for name, ms in times.items()]
    return [*lines, "", "</details>", ""]


def _how_it_ended(part: dict[str, Any]) -> list[str]:
    lines = []
    if part["ended"] != "done":
        said = f" Its last words: `{part['last_words']}`" if part.get("last_words") else ""
        lines.append(f"**Not complete: the part {part['ended']}.**{said}")
    elif part["seconds"]:
        lines.append(f"{part['seconds']:.0f} s of {part['budget_s']:.0f}.")
    if part["others"]:
        lines.append(part["others"])
    return [*lines, ""] if lines else []


def _first_line(why: str) -> str:
    return next((line.strip() for line in why.splitlines() if line.strip()), "no reason given")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _bar(row: dict[str, Any]) -> str:
    return row["name"] if row["target"] is None else f"{row['name']} (target {row['target']:.4g})"


def _colour(row: dict[str, Any]) -> int:
    return _MISSED if row["is_met"] is False else _MET


def _column(charts: list[str]) -> str:
    """Return one SVG with the charts below one another."""
    top, width, parts = 0, drawing.WIDTH, []
    for chart in charts:
        height = int(re.search(r'viewBox="0 0 \d+ (\d+)"', chart)[1])
        placed = chart.replace("<svg ", f'<svg y="{top}" width="{width}" height="{height}" ', 1)
        parts.append(placed)
        top += height
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" role="img">'
    return f"{head}{''.join(parts)}</svg>\n"
