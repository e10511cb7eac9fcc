"""What do first tokens gain where answers bear longer steps: the curve of `target_itl_ms`.

    python benchmarks/serve_target.py --out benchmarks/results

A burst of requests with log-normal lengths comes within a moment, as over HTTP, to engines that differ in
the target between two tokens only. They take turns, round by round, in one process; the first round does not
count.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import serve_load
import torch
from results_file import file_result
from serve_figures import latency, throughput
from serve_models import write_folder
from serve_worker import cpu_s, drive

from penstock.core import clock
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.request import Request

WITHIN_S = 0.15
"""In which all requests of a burst arrive."""


class Engine:
    """With one target."""

    def __init__(self, folder, target_ms):
        config = EngineConfig(
            prefix_caching=False, max_context=2048, cache_gib=1.0, device="cpu", target_itl_ms=target_ms
        )
        self._engine, self._index = build_engine(folder, config), {}

    @property
    def has_work(self):
        """Whether any request has not ended."""
        return self._engine.has_work

    def add(self, index, prompt, max_tokens):
        """Queue a request."""
        self._index[self._engine.add(Request(prompt=tuple(prompt), max_tokens=max_tokens))] = index

    def step(self):
        """Return the indices that got a token."""
        return [self._index[piece.request_id] for piece in self._engine.step() for _ in piece.token_ids]


def measure(folder, arguments):
    """Return target -> figures, medians over rounds."""
    vocabulary = int(serve_load.SHAPES[arguments.model].split("/")[-1])
    requests = serve_load.many(arguments.requests, vocabulary=vocabulary, seed=64, scale=arguments.scale)
    for place, wanted in enumerate(requests):
        wanted["arrival_s"] = WITHIN_S * place / len(requests)
    engines = {target: Engine(folder, target) for target in arguments.targets}
    found = {target: [] for target in engines}
    order = np.random.default_rng(0)
    for number in range(-1, arguments.rounds):
        for target in order.permutation(list(engines)).tolist():
            cpu, begin = cpu_s(), clock.monotonic()
            stamps, tokens = drive(engines[target], requests)
            wall, cpu = clock.monotonic() - begin, max(cpu_s() - cpu, 0.01)
            row = latency(requests, [np.array(times) for times in stamps])
            if number >= 0:
                found[target].append({**row, **throughput(sum(tokens), wall, cpu)})
    return {
        target: {name: float(np.median([row[name] for row in rows])) for name in rows[0]}
        for target, rows in found.items()
    }


def parse(words=None):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--model", choices=serve_load.SHAPES, default="125m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--weights", type=Path, help="folder in which random models are kept between runs")
    parser.add_argument("--targets", type=float, nargs="+", default=[25, 50, 100, 200, 400], metavar="MS")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    return parser.parse_args(words)


def main():
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        kept = (arguments.weights or Path(folder)) / f"{arguments.model}-{arguments.dtype}"
        write_folder(kept, arguments.model, arguments.dtype)
        curve = measure(kept, arguments)
    for target, row in curve.items():
        print(
            f"{target:6.0f} ms: first token p50 {row['ttft_p50_ms']:,.0f}, p99 {row['ttft_p99_ms']:,.0f} ms; "
            f"between p50 {row['between_p50_ms']:,.0f}, p99 {row['between_p99_ms']:,.0f} ms; "
            f"{row['tokens_per_s']:,.0f} tokens/s"
        )
    settings = {key: value for key, value in vars(arguments).items() if key not in ("out", "weights")}
    result = {"settings": settings, "threads": torch.get_num_threads(), "curve": curve}
    if arguments.out:
        file_result(arguments.out, "serve_target", result, packages=("torch",))


if __name__ == "__main__":
    main()
