"""File what a benchmark measured: JSON with the date, the machine and the versions, and its drawings."""

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from penstock.core import clock
from penstock.core.files import write_atomic

SHARED = "The machine was shared with other work: compare figures of one run with each other only."


def cpu_name():
    """What the processor calls itself."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.machine()


def versions(*packages):
    """Return the versions of Python, numpy and those of the named packages that are installed."""
    found = {"python": platform.python_version(), "numpy": np.__version__}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def file_result(
    folder, name, result, *, drawings: Mapping[str, str] | None = None, packages=(), announce=True
):
    """Write `name-DATE.json`, and `name-DATE-KEY.svg` for each drawing; return the paths.

    Args:
        result: JSON values; date, machine and versions are put before them.
        drawings: key -> SVG text.
        packages: names of the distributions whose versions matter.
        announce: whether to print where.
    """
    date = clock.utc_now()[:10]
    head = {
        "benchmark": name,
        "date": date,
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "shared": SHARED},
        "versions": versions(*packages),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}-{date}.json"]
    write_atomic(paths[0], json.dumps({**head, **result}, indent=1) + "\n")
    for key, svg in (drawings or {}).items():
        paths.append(folder / f"{name}-{date}-{key}.svg")
        paths[-1].write_text(svg)
    if announce:
        print(*(f"filed in {path}" for path in paths), sep="\n")
    return paths
