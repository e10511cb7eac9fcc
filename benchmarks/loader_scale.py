"""Do time and memory to a batch grow with the corpus, from 10^6 to 10^14 tokens?

    python benchmarks/loader_scale.py --out benchmarks/results

Computed corpora (`synthetic:`, documents of 1,000 tokens on average: 10^11 documents in 100,000 shards at
10^14), sequence length 4,096, batches of 64 rows, which touch all 64 lanes. Each figure is the middle of
several fresh processes, which only import before the clock starts:

    first    make the loader, get batch 0
    resume   make the loader, load a state at half an epoch, get the next batch
    far      get batch 10,000,000, from a loader that is open
    state    bytes of the state as JSON
    cpu      the same times in CPU milliseconds, by which targets are judged, so that a busy machine does
             not decide
    memory   most resident memory above that of the interpreter with its imports
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import drawing
from measuring import memory_kib
from results_file import file_result

from penstock.core import clock

SIZES = (10**6, 10**9, 10**12, 10**14)
LENGTH, ROWS, MEAN_DOCUMENT, FAR = 4096, 64, 1000, 10**7
TARGETS = {"concat": 100.0, "best_fit": 1000.0}
MEMORY_TARGET_MIB = 200


def measure_once(tokens, packing):
    """Return the figures of this fresh process."""
    from penstock.data import Loader

    options = {"sequence_length": LENGTH, "global_batch_size": ROWS, "packing": packing, "deliver": "numpy"}
    corpora = {"web": f"synthetic:tokens={tokens},mean_document={MEAN_DOCUMENT},seed=1"}
    before = memory_kib("VmRSS")
    (first_ms, first_cpu_ms), loader = _timed(lambda: _loader(Loader, corpora, options, step=0))
    half = loader.samples_per_epoch["web"] // 2 // ROWS
    state = loader.state_at(half)
    (resume_ms, resume_cpu_ms), _ = _timed(lambda: _loader(Loader, corpora, options, step=half, state=state))
    (far_ms, far_cpu_ms), _ = _timed(lambda: loader.batch_at(FAR))
    return {
        "first_ms": first_ms,
        "resume_ms": resume_ms,
        "far_ms": far_ms,
        "first_cpu_ms": first_cpu_ms,
        "resume_cpu_ms": resume_cpu_ms,
        "far_cpu_ms": far_cpu_ms,
        "state_bytes": len(json.dumps(loader.state_at(FAR), separators=(",", ":"))),
        "memory_mib": (memory_kib("VmHWM") - before) / 1024,
        "epoch_samples": loader.samples_per_epoch["web"],
    }


def _loader(make, corpora, options, *, step, state=None):
    loader = make(corpora, **options)
    if state:
        loader.load_state_dict(state)
    if loader.step != step:
        raise AssertionError(f"at step {loader.step}, not {step}")
    loader.batch_at(step)
    return loader


def _timed(work):
    start, used = clock.monotonic(), clock.cpu_seconds()
    done = work()
    return ((clock.monotonic() - start) * 1e3, (clock.cpu_seconds() - used) * 1e3), done


def measure(sizes, processes):
    """Return packing -> tokens -> figures, medians over processes."""
    found = {}
    for packing in TARGETS:
        for tokens in sizes:
            runs = []
            for _ in range(processes):
                command = [sys.executable, __file__, "--once", str(tokens), packing]
                runs.append(
                    json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                )
            middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            found.setdefault(packing, {})[str(tokens)] = {
                key: round(value, 2) for key, value in middle.items()
            }
            shown = "  ".join(f"{key} {value:,.1f}" for key, value in middle.items())
            print(f"{packing:9} {tokens:.0e}  {shown}", flush=True)
    return found


def verdicts(found):
    """Return packing -> whether the targets are met at the largest size."""
    judged = {}
    for packing, by_size in found.items():
        largest = by_size[max(by_size, key=int)]
        judged[packing] = {
            "times_below_cpu_ms": TARGETS[packing],
            "times_met": all(
                largest[f"{what}_cpu_ms"] < TARGETS[packing] for what in ("first", "resume", "far")
            ),
            "memory_below_mib": MEMORY_TARGET_MIB,
            "memory_met": largest["memory_mib"] < MEMORY_TARGET_MIB,
        }
    return judged


def drawn(found):
    """Return the drawings: times and memory over size."""

    def series(keys):
        return [
            drawing.Line(
                name=f"{packing}, {label}",
                x=[float(tokens) for tokens in by_size],
                y=[one[key] for one in by_size.values()],
            )
            for packing, by_size in found.items()
            for key, label in keys.items()
        ]

    times = {
        "first_cpu_ms": "first batch",
        "resume_cpu_ms": "resume at half an epoch",
        "far_cpu_ms": "batch 10,000,000",
    }
    options = {"x_label": "tokens of the corpus", "log_x": True}
    return {
        "time": drawing.lines(
            "CPU milliseconds to a batch", series(times), y_label="CPU ms", log_y=True, **options
        ),
        "memory": drawing.lines(
            "Memory above the interpreter",
            series({"memory_mib": "memory"}),
            y_label="MiB",
            from_zero=True,
            **options,
        ),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=SIZES)
    parser.add_argument("--processes", type=int, default=5, help="fresh processes for each figure")
    parser.add_argument("--once", nargs=2, metavar=("TOKENS", "PACKING"), help="what each of them does")
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON and SVG")
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(measure_once(int(arguments.once[0]), arguments.once[1])))
        return
    found = measure([int(size) for size in arguments.sizes], arguments.processes)
    judged = verdicts(found)
    print(judged)
    if arguments.out:
        result = {"processes": arguments.processes, "targets_met": judged, "figures": found}
        file_result(arguments.out, "loader_scale", result, drawings=drawn(found))


if __name__ == "__main__":
    main()
