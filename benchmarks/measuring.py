"""Rates of several settings in one interleaved run, per second and per CPU-second.

Settings take turns, round by round, so that other load on the machine falls on all alike; figures are
medians over the rounds.
"""

import gc
import resource
import statistics
from pathlib import Path

from penstock.core import clock


def _children_cpu_s():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rate(work):
    """Call `work()`, which returns the tokens it delivered; return (tokens/s, tokens/CPU-s).

    CPU time is that of this process, all its threads, and the processes that `work` started and joined.
    """
    gc.collect()
    wall, cpu = clock.monotonic(), clock.cpu_seconds() + _children_cpu_s()
    tokens = work()
    cpu = clock.cpu_seconds() + _children_cpu_s() - cpu
    return tokens / (clock.monotonic() - wall), tokens / max(cpu, 1e-9)


def interleaved(settings, *, rounds):
    """Measure each of name -> work, in turn, `rounds` times, after one round that does not count.

    Returns:
        name -> {"per_s": [rounds], "per_cpu_s": [rounds]}.
    """
    found = {name: {"per_s": [], "per_cpu_s": []} for name in settings}
    gc.freeze()  # of what is there by now, all looks together find nothing, in a seventh of a second each
    for number in range(-1, rounds):
        for name, work in settings.items():
            per_s, per_cpu_s = rate(work)
            if number >= 0:
                found[name]["per_s"].append(per_s)
                found[name]["per_cpu_s"].append(per_cpu_s)
        print(f"round {number + 1} of {rounds}" if number >= 0 else "warmed up", flush=True)
    gc.unfreeze()
    return found


def median(values):
    """Return the middle value."""
    return statistics.median(values)


def memory_kib(field="RssAnon"):
    """Return this process's memory of one kind, as /proc says it; anonymous leaves mapped files out."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0
