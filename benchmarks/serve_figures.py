"""From the moments at which tokens came to the figures of the serving benchmark."""

import numpy as np

_TICK_S = 0.01  # CPU time is counted in these


def figures(case, requests, reply):
    """Return the figures of one case.

    Args:
        reply: "stamps": per request, when each token came, in seconds from the start of the case, or each
            event of a server, which may bring several; "tokens": how many came; "wall_s" and "cpu_s".
    """
    stamps = [np.array(times) for times in reply["stamps"]]
    for tokens, wanted in zip(reply["tokens"], requests, strict=True):
        assert tokens == wanted["max_tokens"], (case, tokens, wanted["max_tokens"])
    wall, cpu = reply["wall_s"], max(reply["cpu_s"], _TICK_S)
    if case == "single":
        times = stamps[0]
        share = (times[-1] - times[0]) / wall
        after_first = reply["tokens"][0] - 1
        per_token = (times[-1] - times[0]) / after_first
        return {"ms_per_token": 1e3 * per_token, "cpu_ms_per_token": 1e3 * cpu * share / after_first}
    if case == "prefill":
        length = len(requests[0]["prompt"])
        return {
            "prompt_tokens_per_s": length / stamps[0][0],
            "prompt_tokens_per_cpu_s": length / max(cpu, _TICK_S),
        }
    return {**throughput(sum(reply["tokens"]), wall, cpu), **latency(requests, stamps)}


def throughput(tokens, wall, cpu):
    """Generated tokens, prompts' time included."""
    return {"tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / cpu}


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


def tables(results):
    """Return the lines of three tables, an engine a row: per second, per CPU-second, waits."""
    together = [case for case in next(iter(results.values())) if case.endswith("at once")]
    by_wall = [
        ("single", "ms_per_token", "ms/token"),
        ("single", "percent_of_roofline", "% of roofline"),
        ("prefill", "prompt_tokens_per_s", "prompt/s"),
        ("prefill", "percent_of_peak", "% of peak"),
    ]
    by_wall += [(case, "tokens_per_s", f"{case.split()[0]}: tok/s") for case in together]
    by_cpu = [
        ("single", "cpu_ms_per_token", "CPU ms"),
        ("prefill", "prompt_tokens_per_cpu_s", "prompt/CPU-s"),
    ]
    by_cpu += [(case, "tokens_per_cpu_s", f"{case.split()[0]}: tok/CPU-s") for case in together]
    waits = [
        (case, f"{name}_{percent}_ms", f"{case.split()[0]}: {name} {percent}")
        for case in together
        for name in ("ttft", "between")
        for percent in ("p50", "p99")
    ]
    return [line for columns in (by_wall, by_cpu, waits) for line in (*_table(results, columns), "")]


def _table(results, columns):
    yield "engine".ljust(26) + "".join(title.rjust(18) for _, _, title in columns)
    for engine, found in results.items():
        values = [found[case][name] for case, name, _ in columns]
        yield engine.ljust(26) + "".join(f"{value:,.1f}".rjust(18) for value in values)
