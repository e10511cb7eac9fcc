"""From the moments at which tokens came to the figures of the serving benchmark."""

import numpy as np


def figures(case, requests, reply):
    """Return the figures of one case.

    Args:
        reply: "stamps": per request, when each token came, in seconds from the start of the case;
            "wall_s" and "cpu_s" of all of it.
    """
    stamps = [np.array(times) for times in reply["stamps"]]
    for times, wanted in zip(stamps, requests, strict=True):
        assert len(times) == wanted["max_tokens"], (case, len(times), wanted["max_tokens"])
    wall, cpu = reply["wall_s"], reply["cpu_s"]
    if case == "single":
        times = stamps[0]
        share = (times[-1] - times[0]) / wall
        per_token = (times[-1] - times[0]) / (len(times) - 1)
        return {"ms_per_token": 1e3 * per_token, "cpu_ms_per_token": 1e3 * cpu * share / (len(times) - 1)}
    if case == "prefill":
        length = len(requests[0]["prompt"])
        return {"prompt_tokens_per_s": length / stamps[0][0], "prompt_tokens_per_cpu_s": length / cpu}
    return {**throughput(stamps, wall, cpu), **latency(requests, stamps)}


def throughput(stamps, wall, cpu):
    """Generated tokens, prompts' time included."""
    tokens = sum(len(times) for times in stamps)
    return {"tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / max(cpu, 1e-9)}


def latency(requests, stamps):
    """Times to the first token, and between tokens, in ms."""
    first = [times[0] - wanted["arrival_s"] for times, wanted in zip(stamps, requests, strict=True)]
    between = np.concatenate([np.diff(times) for times in stamps])
    found = {}
    for name, values in (("ttft", first), ("between", between)):
        for percent in (50, 99):
            found[f"{name}_p{percent}_ms"] = 1e3 * float(np.percentile(values, percent))
    return found


def median_of(rounds):
    """Return the median of each figure over rounds."""
    return {name: float(np.median([found[name] for found in rounds])) for name in rounds[0]}


def table(results, roofline_ms):
    """Return the lines of one table: an engine a row."""
    columns = [
        ("single", "ms_per_token", "ms/token"), ("prefill", "prompt_tokens_per_s", "prompt/s"),
    ]  # fmt: skip
    concurrent = [case for case in next(iter(results.values())) if case.endswith("at once")]
    for case in concurrent:
        count = case.split()[0]
        columns += [(case, "tokens_per_s", f"{count}: tok/s"), (case, "tokens_per_cpu_s", "per CPU-s")]
        columns += [(case, "ttft_p50_ms", "ttft p50"), (case, "ttft_p99_ms", "p99")]
        columns += [(case, "between_p50_ms", "between p50"), (case, "between_p99_ms", "p99")]
    lines = ["engine".ljust(22) + "".join(title.rjust(13) for _, _, title in columns)]
    for engine, found in results.items():
        values = [found.get(case, {}).get(name) for case, name, _ in columns]
        cells = ["-" if value is None else f"{value:,.1f}" for value in values]
        lines.append(engine.ljust(22) + "".join(cell.rjust(13) for cell in cells))
    return [*lines, f"roofline: {roofline_ms:.1f} ms/token (bytes of the weights / bandwidth)"]
