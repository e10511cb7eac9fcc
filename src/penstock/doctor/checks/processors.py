"""Check: CPU cores, their clock rate, and other load."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.core.env import num_cores
from penstock.doctor.checks.check import CheckOptions, Finding, green, yellow
from penstock.doctor.checks.proc_files import text_of

CHECK = "processors"

_SYSTEM = Path("/sys/devices/system")
_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SLOW_GOVERNORS = ("powersave", "conservative")
_BUSY_SHARE = 0.5
"""Share of the machine's cores in use by others before a run begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuFacts:
    """CPU cores of a machine."""

    model: str
    cores: int
    """Cores of the machine."""
    granted: int
    """Cores available to this process, by its affinity and its control group."""
    load: float
    """Average number of runnable threads in the last minute."""
    governor: str
    """Governor of the clock rate; empty: not set by the kernel, as in most virtual machines."""
    driver: str
    """Driver that sets the clock rate."""
    huge_pages: str
    """always, madvise or never; empty: unknown."""
    numa_nodes: int


def measure(_options: CheckOptions) -> CpuFacts:
    """Read /proc and /sys."""
    frequency = _SYSTEM / "cpu" / "cpu0" / "cpufreq"
    return CpuFacts(
        model=model_of(text_of(Path("/proc/cpuinfo"))),
        cores=os.cpu_count() or 1,
        granted=num_cores(),
        load=os.getloadavg()[0],
        governor=text_of(frequency / "scaling_governor"),
        driver=text_of(frequency / "scaling_driver"),
        huge_pages=chosen(text_of(_PAGES)),
        numa_nodes=len(list((_SYSTEM / "node").glob("node[0-9]*"))) or 1,
    )


def model_of(cpuinfo: str) -> str:
    """Return the processor's name, from the text of /proc/cpuinfo.

    >>> model_of("processor : 0\\nmodel name : AMD EPYC 7B13\\n")
    'AMD EPYC 7B13'
    """
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), "unknown CPU")


def chosen(text: str) -> str:
    """Return the selected value, in brackets.

    >>> chosen("always [madvise] never")
    'madvise'
    """
    return text.partition("[")[2].partition("]")[0]


def judge(facts: CpuFacts) -> Iterator[Finding]:
    """Judge what slows the cores."""
    nodes = "" if facts.numa_nodes == 1 else f", {facts.numa_nodes} NUMA nodes"
    pages = f", huge pages {facts.huge_pages}" if facts.huge_pages else ""
    yield green(f"{facts.model}: {facts.granted} of {facts.cores} cores{nodes}{pages}")
    if facts.governor in _SLOW_GOVERNORS and facts.driver != "intel_pstate":  # whose "powersave" is fast
        yield yellow(
            f"The clock rate is chosen by the governor {facts.governor!r}",
            remedy="cpupower frequency-set -g performance",
        )
    if facts.huge_pages == "never":
        yield yellow(
            "Transparent huge pages are off: large tensors of the CPU lie in pages of 4 KiB",
            remedy="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if facts.load > _BUSY_SHARE * facts.cores:
        yield yellow(
            f"Others are at work here: a load of {facts.load:.1f} on {facts.cores} cores",
            remedy="Wait for them; the speeds below are too low by what they take.",
        )
