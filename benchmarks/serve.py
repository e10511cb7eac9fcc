"""How fast do we answer, alone and under load, beside other engines and the memory's speed?

    python benchmarks/serve.py --model 125m --dtype bfloat16 --peers /tmp/peers/serve/bin/python

Each engine has a process of its own, under its own interpreter, and as many threads as all others: the same
random weights, prompts and numbers of tokens. "http" in a row's name: through its server, asked by one small
client of sockets (serve_http.py); otherwise in process, step by step. Cases:

    single      one request: ms a token, from the first token to the last; and the share of the roofline, by
                what memory gave just before and after (of stored weights, also for rows in fewer bits)
    prefill     one prompt of 1,024 tokens: tokens/s until its first token; and the share of the matrix peak,
                the fastest of some large products of the same numbers in the same round
    16, 64      so many requests at once, log-normal lengths: generated tokens/s of all of it, prompts
                included; ms to the first token and between tokens (of a server: its events), p50 and p99
    start       from the start of a process to its first token (`start_s`)
    open loop   Poisson arrivals at shares of what the engine reached with most at once (--load), drawn

Engines come in an order drawn anew for each case and round, after seconds of calm: threads of some spin on
the cores for a while after an answer. The first round does not count; figures are medians over rounds, per
second and per CPU-second (of a process and its children; of a server without the client). The roofline is the
bytes of the weights that a token reads over the bandwidth measured in the same rounds, with all cores. An
engine that does not start is left out, with a line that says so.

Prefix caches are off, for each round has the same prompts, and weights are as stored unless a row's name
says otherwise. The scheduler's share of a step is Penstock's own count. All engines are in memory at the
same time: --only names those that fit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import serve_load
import torch
from drawing import Line, lines
from results_file import file_result
from serve_figures import figures, latency, median_of, tables, throughput
from serve_models import prompt_flop, write_folder
from serve_vllm import tuned
from serve_worker import ENGINES
from torch import nn

from penstock.core import clock
from penstock.core.huge_pages import reserve
from penstock.nn.linear.packed import packed

HERE = Path(__file__).parent


class Worker:
    """One engine's process."""

    def __init__(self, name, folder, arguments, log):
        own = name.startswith("penstock")
        python = sys.executable if own else arguments.peers
        begin = clock.monotonic()
        self._process = subprocess.Popen(
            [python, HERE / "serve_worker.py", name, folder, arguments.dtype],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=environment(arguments, name),
        )  # fmt: skip
        opened = self._reply()
        self.opened_s, self.versions = opened["opened_s"], opened["versions"]
        self.ask(serve_load.one(16, 1, vocabulary=64, seed=0))
        self.start_s = clock.monotonic() - begin

    def ask(self, requests):
        """Serve; return the reply."""
        print(json.dumps(requests), file=self._process.stdin, flush=True)
        return self._reply()

    def close(self):
        """End it."""
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _reply(self):
        line = self._process.stdout.readline()
        if not line:
            raise EngineEnded
        return json.loads(line)


class EngineEnded(Exception):
    """A worker ended without an answer; its log says why."""


def environment(arguments, name):
    """Return the environment of a worker; a peer has nothing of ours."""
    own = name.startswith("penstock")
    kept = {key: value for key, value in os.environ.items() if own or key != "PYTHONPATH"}
    kept["OMP_NUM_THREADS"] = str(arguments.threads or os.cpu_count())
    return tuned(kept, arguments.peers.parent.parent) if name.startswith("vllm") else kept


_PASS_BYTES = 2**28
_PRODUCT = 1024, 2048, 2048  # tokens, inputs, outputs


def bandwidth(numbers, num_threads):
    """Bytes/s at which the threads read memory: the best of some passes of two kinds."""
    torch.set_num_threads(num_threads or os.cpu_count())
    best = 0.0
    for read in (numbers.amax, numbers.sum) * 4:
        start = clock.monotonic()
        read()
        best = max(best, numbers.nbytes / (clock.monotonic() - start))
    return best


def matrix_peak(dtype, num_threads):
    """Flop/s of large products: the best of torch's and, where it is built, of Penstock's own."""
    torch.set_num_threads(num_threads or os.cpu_count())
    tokens, inputs, outputs = _PRODUCT
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).to(dtype)
    own = packed(nn.Linear(inputs, outputs, bias=False, dtype=dtype))
    ways = (lambda: x @ weight.T, lambda: own(x))
    best = 0.0
    with torch.inference_mode():
        for way in ways * 4:
            start = clock.monotonic()
            way()
            best = max(best, 2 * tokens * inputs * outputs / (clock.monotonic() - start))
    return best


def open_workers(stack, folder, arguments):
    """Return name -> worker of the engines that start."""
    workers = {}
    for name in arguments.only:
        if arguments.peers is None and not name.startswith("penstock"):
            continue
        log = stack.enter_context((folder / f"{name}.log").open("w"))
        try:
            workers[name] = Worker(name, folder, arguments, log)
        except (EngineEnded, BrokenPipeError):
            print(f"{name} is left out: it did not start, see {log.name}")
            continue
        stack.callback(workers[name].close)
        print(f"{name}: {workers[name].start_s:.1f} s to its first token", flush=True)
    return workers


def measure(workers, arguments, read_bytes):
    """Return engine -> case -> figures, what the machine gave, and the scheduler's share."""
    asked = serve_load.cases(arguments)
    found = {name: {case: [] for case in asked} for name in workers}
    machine, shares = Machine(arguments), []
    for number in range(-1, arguments.rounds):
        for case, requests in asked.items():
            for name in machine.order.permutation(list(workers)).tolist():
                before = machine.look(case)
                clock.sleep(arguments.calm)
                try:
                    reply = workers[name].ask(requests)
                except (EngineEnded, BrokenPipeError):
                    print(f"{name} ended in the case {case}: it is left out")
                    del workers[name], found[name]
                    continue
                row = figures(case, requests, reply)
                if case == "single":
                    clock.sleep(arguments.calm)
                    read_ms = 1e3 * read_bytes / np.mean([before, machine.look(case)])
                    row["percent_of_roofline"] = 100 * read_ms / row["ms_per_token"]
                if case == "prefill":
                    flop = prompt_flop(arguments.model, len(requests[0]["prompt"]))
                    row["percent_of_peak"] = 100 * flop / reply["stamps"][0][0] / before
                if number >= 0:
                    found[name][case].append(row)
                if name == "penstock":
                    shares.append(reply["scheduler_share"])
        print(f"round {number + 1} of {arguments.rounds}" if number >= 0 else "warmed up", flush=True)
    medians = {
        name: {case: median_of(rounds) for case, rounds in cases.items()} for name, cases in found.items()
    }
    return medians, machine, shares[-1] if shares else None


class Machine:
    """What the machine gives: bytes/s and flop/s, looked at beside the cases that they bound."""

    def __init__(self, arguments):
        self._numbers = torch.frombuffer(reserve(_PASS_BYTES), dtype=torch.float32).fill_(1)  # in huge pages
        self._arguments = arguments
        self.order = np.random.default_rng(0)
        self.bytes_per_s = self.flop_per_s = 0.0

    def look(self, case):
        """Measure what bounds a case, and keep the best."""
        threads = self._arguments.threads
        if case == "single":
            found = bandwidth(self._numbers, threads)
            self.bytes_per_s = max(found, self.bytes_per_s)
        elif case == "prefill":
            found = matrix_peak(getattr(torch, self._arguments.dtype), threads)
            self.flop_per_s = max(found, self.flop_per_s)
        else:
            found = 0.0
        return found


def under_load(workers, results, arguments):
    """Return engine -> [load, figures]: arrivals at shares of what each engine reached with all at once."""
    vocabulary = int(serve_load.SHAPES[arguments.model].split("/")[-1])
    busiest = f"{max(arguments.concurrent)} at once"
    found = {}
    for name, worker in workers.items():
        if name == "transformers":  # it takes one batch and no more
            continue
        best = results[name][busiest]["tokens_per_s"]
        rows = found[name] = []
        for share in arguments.load:
            requests = serve_load.many(
                arguments.requests, vocabulary=vocabulary, seed=7, scale=arguments.scale, per_s=1.0
            )
            mean = np.mean([wanted["max_tokens"] for wanted in requests])
            for wanted in requests:
                wanted["arrival_s"] *= mean / (share * best)
            reply = worker.ask(requests)
            stamps = [np.array(times) for times in reply["stamps"]]
            row = {
                **throughput(sum(reply["tokens"]), reply["wall_s"], max(reply["cpu_s"], 0.01)),
                **latency(requests, stamps),
            }
            rows.append({"offered_tokens_per_s": share * best, **row})
            print(f"{name} at {share:.0%}: first token p99 {row['ttft_p99_ms']:,.0f} ms", flush=True)
    return found


def run(arguments, folder):
    """Measure; return the result."""
    read_bytes = write_folder(folder, arguments.model, arguments.dtype)
    with ExitStack() as stack:
        workers = open_workers(stack, folder, arguments)
        results, machine, scheduler_share = measure(workers, arguments, read_bytes)
        roofline_ms = 1e3 * read_bytes / machine.bytes_per_s
        print(*tables(results), f"roofline: {roofline_ms:.1f} ms/token", sep="\n")
        print(f"matrix peak: {machine.flop_per_s / 1e9:,.0f} Gflop/s")
        if scheduler_share is not None:
            print(f"scheduler: {scheduler_share:.2%} of Penstock's steps")
        loads = under_load(workers, results, arguments) if arguments.load else {}
        starts = {name: worker.start_s for name, worker in workers.items()}
        versions = {name: worker.versions for name, worker in workers.items()}
    settings = {k: v for k, v in vars(arguments).items() if k not in ("out", "weights", "peers")}
    return {
        "settings": settings, "roofline_ms": roofline_ms, "bandwidth_gb_s": machine.bytes_per_s / 1e9,
        "matrix_peak_gflop_s": machine.flop_per_s / 1e9,
        "scheduler_share": scheduler_share, "start_s": starts, "engines": versions,
        "results": results, "under_load": loads,
    }  # fmt: skip


def drawn(loads):
    """Return the drawing of latency against load."""
    series = [
        Line(
            name=f"{name}, {percent}",
            x=[row["tokens_per_s"] for row in rows],
            y=[row[f"ttft_{percent}_ms"] for row in rows],
        )
        for name, rows in loads.items()
        for percent in ("p50", "p99")
    ]
    title = "Time to the first token against load, Poisson arrivals"
    return lines(title, series, x_label="generated tokens/s", y_label="ms", log_y=True)


def parse(words=None):
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result")
    parser.add_argument("--model", choices=serve_load.SHAPES, default="125m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--weights", type=Path, help="folder in which random models are kept between runs")
    parser.add_argument(
        "--peers", type=Path, help="the interpreter that has the other engines; none: no peers"
    )
    parser.add_argument("--threads", type=int, help="of each engine; default: one a core")
    parser.add_argument("--only", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calm", type=float, default=4.0, help="seconds before each engine's turn")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths")
    parser.add_argument(
        "--load", type=float, nargs="*", help="shares; default: 0.3 0.6 0.8 1 1.2, or none if --quick"
    )
    parser.add_argument("--requests", type=int, default=96, help="of each rate of arrivals")
    parser.add_argument("--quick", action="store_true", help="one round, a third of the lengths, no arrivals")
    arguments = parser.parse_args(words)
    if any(share <= 0 for share in arguments.load or ()):
        parser.error("--load: shares are above 0; --load without any measures none")
    if arguments.quick:
        arguments.rounds, arguments.scale = 1, arguments.scale / 3
    if arguments.load is None:
        arguments.load = [] if arguments.quick else [0.3, 0.6, 0.8, 1.0, 1.2]
    return arguments


def main():
    arguments = parse()
    with ExitStack() as stack:
        kept = arguments.weights or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = run(arguments, kept / f"{arguments.model}-{arguments.dtype}")
    if arguments.out:
        drawings = {"load": drawn(result["under_load"])} if result["under_load"] else {}
        file_result(arguments.out, "serve", result, drawings=drawings, packages=("torch",))


if __name__ == "__main__":
    main()
