"""CPU-seconds of imports and of a training of one step, of this checkout and of another.

    python benchmarks/imports.py --before ../other/src

Each module is imported by fresh processes, alternately from both checkouts, so that they share the machine's
weather; the median counts. "Beyond torch" is without what `import torch` takes. The training is of a model of
two blocks of 32, by `penstock train` from its first import to its exit.
"""

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from results_file import file_result

from penstock.testing.corpora import write_corpus

MODULES = ("penstock.train.run", "penstock.serve.app", "penstock.data.loader")
RESULTS = Path(__file__).parent / "results"
RECIPE = """
compute = "float32"
[run]
steps = 1
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
vocab_size = 64
[data]
sequence_length = 16
global_batch_size = 4
[schedule]
rule = "constant"
"""


def cpu_seconds(words, source):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    variables = os.environ | {"PYTHONPATH": str(source)}
    subprocess.run(
        [sys.executable, *words],
        check=True,
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def first_step(source):
    """Return the CPU-seconds of a training of one step."""
    with TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", [[1 + n % 60] * 40 for n in range(200)], vocab_size=64)
        (recipe := Path(folder) / "recipe.toml").write_text(RECIPE)
        settings = {"run.dir": Path(folder) / "run", "data.corpora.c.path": corpus}
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        return cpu_seconds(["-m", "penstock", "train", recipe, *words], source)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="sources to compare with")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result")
    asked = parser.parse_args()
    places = {"before": asked.before.resolve(), "after": Path(__file__).resolve().parents[1] / "src"}
    found = {name: {place: [] for place in places} for name in ("torch", *MODULES)}
    steps = {place: [] for place in places}
    for _ in range(asked.runs):
        for place, source in places.items():
            steps[place].append(first_step(source))
        for name, seconds in found.items():
            for place, source in places.items():
                seconds[place].append(cpu_seconds(["-c", f"import {name}"], source))
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
    before, after = map(median, steps.values())
    step = {"before_s": round(before, 2), "after_s": round(after, 2), "ratio": round(after / before, 3)}
    print(f"a training of one step: {before:.2f} -> {after:.2f} s, {step['ratio']:.2f}")
    result = {"torch_s": round(torch, 2), "modules": rows, "one_step": step}
    file_result(asked.out, "imports", result, packages=("torch",))


if __name__ == "__main__":
    main()
