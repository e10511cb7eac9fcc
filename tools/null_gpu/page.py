"""A filed count of the null GPU as a page: bounds, and the plain loop and Penstock side by side."""

from collections.abc import Mapping, Sequence
from typing import Any

from tools.null_gpu.bounds import Counts, Judged

_ROWS = {
    "launches": "launches",
    "optimizer_launches": "of them in the optimizer",
    "waits": "waits of the host",
    "early_waits": "of them before the next graph is launched",
    "uploads": "uploads",
    "upload_bytes": "bytes uploaded",
    "copies": "copies on the device",
    "copy_bytes": "bytes copied on the device",
    "peak_bytes": "bytes of the allocator at its peak",
    "planned_bytes": "bytes that the plan says",
    "graph_launches": "launches of graphs",
    "launches_in_graphs": "launches within graphs",
    "graphs_recorded": "graphs recorded in 20 steps",
    "kernels_compiled": "kernels compiled in 20 steps",
}


def page(result: Mapping[str, Any], judged: Sequence[Judged], missing: Sequence[str]) -> str:
    """Return Markdown."""
    counts: Counts = result["counts"]
    lines = [f"# Counted on the null GPU, {result['date']}", ""]
    lines += [
        "Counts, not measurements: kernels did nothing, and nothing below is a GPU's time or value. torch "
        f"{result['torch']}; an H100 by name. Attention is counted through FlashAttention, because cuDNN's "
        "attention is not stubbed.",
        "",
    ]
    lines += [
        "## Bounds",
        "",
        "| program | count | value | bound | allowed now | |",
        "|---|---|---:|---:|---:|---|",
    ]
    for one in sorted(judged, key=lambda one: (one.is_within, one.is_reached)):
        state = "held" if one.is_reached else "to come" if one.is_within else "**broken**"
        now = "" if one.now is None else f"{one.now:,.10g}"
        about = f"{state}: {one.why}"
        lines.append(f"| {one.of} | {one.count} | {one.value:,.10g} | {one.limit:,.10g} | {now} | {about} |")
    lines += ["", *(f"- **not counted**: {what}" for what in missing), *([""] if missing else [])]
    lines += _side_by_side("A training step of Llama 3.2 1B, compiled, 8,192 tokens", "train ", counts)
    lines += _side_by_side("A step of decoding, 8B with 2 layers", "serve ", counts)
    lines += _tables("Launches of a step, the most frequent", "kernels", counts)
    lines += _tables("Waits of a step, and where", "waits_at", counts)
    return "\n".join(lines)


def _side_by_side(title: str, prefix: str, counts: Counts) -> list[str]:
    names = [name for name in counts if name.startswith(prefix) and "waits" in counts[name]]
    lines = [f"## {title}", "", f"| a step | {' | '.join(name.removeprefix(prefix) for name in names)} |"]
    lines.append("|---|" + "---:|" * len(names))
    for key, words in _ROWS.items():
        values = [counts[name].get(key) for name in names]
        if any(values):
            lines.append(f"| {words} | {' | '.join('' if v is None else f'{v:,.10g}' for v in values)} |")
    return [*lines, ""]


def _tables(title: str, key: str, counts: Counts) -> list[str]:
    lines = [f"## {title}", ""]
    for name, found in counts.items():
        if found.get(key):
            lines += [f"<details><summary>{name}</summary>", "", "| | a step |", "|---|---:|"]
            lines += [f"| `{what.replace('|', ' ')}` | {n:,.4g} |" for what, n in found[key].items()]
            lines += ["", "</details>", ""]
    return lines
