"""Is this version slower than another one? Both take turns in one run.

    python benchmarks/versions.py --before /path/to/other/checkout/.venv/bin/python --out benchmarks/results

Each figure is taken in a fresh process of its version's interpreter, through the public API and the command
line, versions in turn, round by round; medians over rounds. A `ratio` above 1 says that this version is
faster. The script ends with exit code 1 if a ratio is below 0.97.

    help, train help    CPU seconds of `penstock --help` and `penstock train --help`
    train               CPU seconds of `penstock train` for one step of a tiny model
    step                CPU milliseconds of a training step of a tiny model, by which meters and checks show
    concat, best_fit    million tokens per CPU-second of the loader with labels, 64 rows of 4,096
    first batch         CPU milliseconds until the first batch of 10^14 computed tokens
    alone, 16           serving a 134M Llama in bfloat16, random weights: milliseconds a token of one
                        request, and tokens/s of 16 at once with prompts of 128 tokens
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from corpora import lognormal_lengths, random_tokens, write
from results_file import file_result
from serve_models import write_folder

SMALLER_IS_BETTER = {"help", "train help", "train", "step", "first batch", "alone"}
WORST = 0.97
RECIPE = """compute = "float32"
run = { dir = "run", steps = 1 }
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
[data]
sequence_length = 64
global_batch_size = 4
corpora = { c = { path = "synthetic:tokens=1e8,vocab_size=300" } }
"""
LOADER = """
import time
from penstock.data import Loader
options = dict(sequence_length=4096, global_batch_size=64, num_workers=0, deliver="numpy")
batches = iter(Loader({"c": "corpus"}, packing="PACKING", **options))
for _ in range(20):
    next(batches)
start = time.process_time()
for _ in range(60):
    next(batches)
print(60 * 64 * 4096 / 1e6 / (time.process_time() - start))
"""
FIRST = """
import time
from penstock.data import Loader
start = time.process_time()
loader = Loader({"c": "synthetic:tokens=1e14"}, sequence_length=4096, global_batch_size=64, num_workers=0)
next(iter(loader))
print(1e3 * (time.process_time() - start))
"""
STEP = """
import resource, subprocess, sys
def cpu_s(steps):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    options = [f"run.dir=steps-{steps}", f"run.steps={steps}"]
    command = [sys.executable, "-m", "penstock", "train", "recipe.toml"]
    subprocess.run([*command, *(w for o in options for w in ("--set", o))], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print((cpu_s(201) - cpu_s(1)) / 200 * 1e3)
"""
SERVE = """
import json, sys, time
from penstock import LLM, EngineConfig, Params, Sampling
def params(tokens):
    return Params(sampling=Sampling(temperature=0.0, min_tokens=tokens), max_tokens=tokens)
with LLM("model", EngineConfig(cache_gib=0.5, prefix_caching=False)) as llm:
    prompts = [[(7 * i * j + i + j) % 30000 + 3 for j in range(128)] for i in range(16)]
    llm.generate(prompts, params(8))
    took = []
    for tokens in (1, 65):
        start = time.perf_counter()
        llm.generate([prompts[0]], params(tokens))
        took.append(time.perf_counter() - start)
    start = time.perf_counter()
    llm.generate(prompts, params(64))
    seconds = time.perf_counter() - start
print(json.dumps({"alone": (took[1] - took[0]) / 64 * 1e3, "16": 16 * 64 / seconds}))
"""
COMMAND = """
import resource, subprocess, sys
subprocess.run([sys.executable, "-m", "penstock", *"WORDS".split()], check=True, capture_output=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
PROBES = {
    "help": COMMAND.replace("WORDS", "--help"),
    "train help": COMMAND.replace("WORDS", "train --help"),
    "train": COMMAND.replace("WORDS", "train recipe.toml"),
    "step": STEP,
    "concat": LOADER.replace("PACKING", "concat"),
    "best_fit": LOADER.replace("PACKING", "best_fit"),
    "first batch": FIRST,
    "alone, 16": SERVE,
}


def probe(interpreter, code, work):
    """Run a probe in a copy of the work folder's links; return its figure or figures."""
    with tempfile.TemporaryDirectory() as folder:
        for path in work.iterdir():
            (Path(folder) / path.name).symlink_to(path)
        done = subprocess.run(
            [interpreter, "-c", code], cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(f"{interpreter} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main():
    """Measure, print and file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="interpreter of the other version")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=PROBES, default=list(PROBES))
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    versions = {"before": str(arguments.before), "now": sys.executable}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "recipe.toml").write_text(RECIPE)
        write(work / "corpus", lognormal_lengths(2 * 10**7), random_tokens("uint16"))
        write_folder(work / "model", "125m", "bfloat16")
        for number in range(-1, arguments.rounds):  # the first round does not count
            for name in arguments.only:
                for version in sorted(versions, reverse=number % 2 == 0):
                    figure = probe(versions[version], PROBES[name], work)
                    for key, value in (figure if isinstance(figure, dict) else {name: figure}).items():
                        found.setdefault(key, {}).setdefault(version, []).append(value)
            print(f"round {number + 1} of {arguments.rounds}", flush=True)
    rows = {}
    for name, taken in found.items():
        before, now = (statistics.median(taken[version][1:]) for version in ("before", "now"))
        ratio = before / now if name in SMALLER_IS_BETTER else now / before
        rows[name] = {"before": before, "now": now, "ratio": ratio, "rounds": taken}
        print(f"{name:<14}{before:>12.3f}{now:>12.3f}{ratio:>8.2f}")
    if arguments.out:
        file_result(arguments.out, "versions", {"results": rows}, packages=("torch",))
    return int(any(row["ratio"] < WORST for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
