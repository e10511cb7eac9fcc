"""CPU-seconds of imports, of this checkout and of another: what every command pays before it does anything.

    python benchmarks/imports.py --before ../other/src

Each module is imported by fresh processes, alternately from both checkouts, so that they share the machine's
weather; the median counts. "Beyond torch" is without what `import torch` takes.
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

from results_file import file_result

MODULES = ("penstock.train.run", "penstock.serve.app", "penstock.data.loader")
RESULTS = Path(__file__).parent / "results"


def cpu_seconds(code, source):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = os.environ | {"PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="sources to compare with")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    asked = parser.parse_args()
    places = {"before": asked.before.resolve(), "after": Path(__file__).resolve().parents[1] / "src"}
    found = {name: {place: [] for place in places} for name in ("torch", *MODULES)}
    for _ in range(asked.runs):
        for name, seconds in found.items():
            for place, source in places.items():
                seconds[place].append(cpu_seconds(f"import {name}", source))
    torch = median(found["torch"]["before"] + found["torch"]["after"])
    rows = {}
    for name in MODULES:
        base = 0.0 if name == "penstock.data.loader" else torch  # which loads no torch
        before, after = (median(found[name][place]) for place in places)
        rows[name] = {
            "before_s": round(before, 2),
            "after_s": round(after, 2),
            "beyond_torch_ratio": round((after - base) / (before - base), 3),
        }
        print(f"{name}: {before:.2f} -> {after:.2f} s, beyond torch {rows[name]['beyond_torch_ratio']:.2f}")
    file_result(asked.out, "imports", {"torch_s": round(torch, 2), "modules": rows}, packages=("torch",))


if __name__ == "__main__":
    main()
