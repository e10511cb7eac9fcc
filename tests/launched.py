"""Set-ups of tests and benchmarks of launched runs: a slow-enough recipe, its processes, its accounts."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.launch.job_folder import JobFolder

PATIENCE_S = 240.0


def write_recipe(path, corpus, *, run, steps, every=10):
    """Write a recipe for a model that takes milliseconds a step, on any of 1, 2, 3 or 4 ranks."""
    path.write_text(f"""
compute = "float32"
[run]
dir = "{run}"
steps = {steps}
log_samples = true
[model]
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[data]
sequence_length = 32
global_batch_size = 12
[data.corpora.python]
path = "{corpus}"
[optim]
learning_rate = 0.01
[checkpoint]
every = {every}
""")
    return path


def records_of(run):
    """Return the records of the steps of a run so far."""
    return [record for record in _all_records(run) if "loss" in record]


def _all_records(run):
    return _lines_of(Path(run) / "metrics.jsonl")


_read, _events = {}, {}
_TAIL_BYTES = 256


def _lines_of(path):
    """Return what the whole lines of a file hold; of a file that has only grown, it reads the new ones."""
    found, read, tail = _read.pop(path, ([], 0, b""))
    try:
        with path.open("rb") as file:
            file.seek(read - len(tail))
            if file.read(len(tail)) != tail:  # it was cut, or is another one
                found, read, tail = [], 0, b""
                file.seek(0)
            new = file.read()
    except FileNotFoundError:
        return []
    new = new[: new.rfind(b"\n") + 1]
    found = [*found, *map(json.loads, new.splitlines())]
    _read.clear()  # a test looks at one file at a time
    _read[path] = found, read + len(new), (tail + new)[-_TAIL_BYTES:]
    return found


def losses_of(run):
    """Return the loss and gradient norm of each step."""
    return {record["step"]: (record["loss"], record["grad_norm"]) for record in records_of(run)}


def newest_step(run):
    """Return the newest step that is recorded; 0: none."""
    return max(losses_of(run), default=0)


def trained_step(run):
    """Return the newest step that the newest start of an elastic run has trained, one rank a node; 0: none.

    After a node is killed, the records of the steps that are lost stay until the ranks of the next start
    remove them: they are of no checkpoint, and no step of that start.
    """
    starts, records = starts_of(run), _all_records(run)
    begins = [index for index, record in enumerate(records) if record.get("event") == "start"]
    if not (starts and begins):
        return 0
    begin = records[begins[-1]]
    if (begin["step"], begin["ranks"]) != starts[-1]:  # of an earlier start
        return 0
    return max((record["step"] for record in records[begins[-1] :] if "loss" in record), default=0)


def events_of(run):
    """Return the transitions of a launched run, which are read again once there are new ones."""
    folder = JobFolder(Path(run))
    known = folder.path, folder.bytes_of_events()
    if known not in _events:
        _events.clear()
        _events[known] = folder.events()
    return _events[known]


def wait_until(is_so, what, *, patience_s=PATIENCE_S, alive=lambda: True, every_s=0.05):
    """Wait until something is so; fails if it does not become so, or if what should run has ended.

    Looking takes a tenth of a core at most: what is read may be long. Whoever asks a server, which has its
    own cost, looks less often.
    """
    end = time.monotonic() + patience_s
    began = time.thread_time()
    while not (found := is_so()):
        assert alive(), f"{what}: the job has ended"
        assert time.monotonic() < end, f"{what} did not happen in {patience_s:g} s"
        time.sleep(max(every_s, 9 * (time.thread_time() - began)))
        began = time.thread_time()
    return found


def ranks_of(run):
    """Return the processes that train in a run's folder, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                logs = os.readlink(folder / "fd" / "1")  # noqa: PTH115 - it need not be a path
                if logs.startswith(f"{run}/launch/logs/rank-"):
                    found[int(logs.rpartition("rank-")[2].removesuffix(".log"))] = int(folder.name)
    return found


@contextmanager
def frozen(pid):
    """Context manager: a process stands still, and with it all that wait for it, without using a core."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(group):
    """Context manager: a process group runs a fifth of the time.

    A training that goes on while a test looks at it would take both cores, and computes for nobody. Leave the
    block before the group is killed or awaited.
    """
    ended = threading.Event()

    def run():
        with suppress(ProcessLookupError):  # its number may be another group's by now
            while not ended.is_set():
                os.killpg(group, signal.SIGSTOP)
                ended.wait(0.2)
                os.killpg(group, signal.SIGCONT)
                ended.wait(0.05)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


MIN_NODES, MAX_NODES = 1, 3
_STEPS_BETWEEN = 6


def disturb(recipe, run, *, seed, num_events, env=None):
    """Launch a recipe on three nodes of an elastic run, disturb it, and stop it.

    Each event is drawn among those that the number of nodes allows: a node is killed, leaves by SIGTERM, or
    joins.

    Returns:
        exit code, and a row for each event: its name, the nodes then, seconds from it to the next new step,
        and the steps that were trained again.
    """
    draw = random.Random(seed)
    command = [sys.executable, "-m", "penstock", "launch", "local", str(recipe)]
    with (Path(run).parent / "launcher.out").open("wb") as out:
        words = ["--nodes", f"{MIN_NODES}:{MAX_NODES}", "--grace", "60"]
        launcher = subprocess.Popen([*command, *words], stdout=out, stderr=out, env=env)
    try:
        rows, nodes = [], MAX_NODES
        for _ in range(num_events):
            rows.append(_event(run, launcher, draw, nodes))
            nodes = rows[-1]["nodes"]
        launcher.send_signal(signal.SIGTERM)
        return launcher.wait(PATIENCE_S), rows
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()


def _event(run, launcher, draw, nodes):
    def is_alive():
        return launcher.poll() is None

    def await_step(step):
        wait_until(lambda: trained_step(run) >= step, f"step {step}", alive=is_alive)

    def is_on(nodes, seen):
        return starts_of(run)[seen:] and starts_of(run)[-1][1] == nodes

    wait_until(lambda: is_on(nodes, 0), f"a start on {nodes} nodes", alive=is_alive)
    await_step(starts_of(run)[-1][0] + _STEPS_BETWEEN)
    event = draw.choice(["join"] * (nodes < MAX_NODES) + ["kill", "leave"] * (nodes > MIN_NODES))
    seen, reached, began = len(starts_of(run)), trained_step(run), time.monotonic()
    if event == "join":
        nodes += 1
        (Path(run) / "launch" / "request.json").write_text(json.dumps({"nodes": nodes}))
    else:
        nodes -= 1
        os.kill(draw.choice(node_pids(run)), signal.SIGKILL if event == "kill" else signal.SIGTERM)
    wait_until(lambda: is_on(nodes, seen), f"{event} to {nodes} nodes", alive=is_alive)
    origin = min(start for start, _ in starts_of(run)[seen:])
    await_step(max(origin, starts_of(run)[-1][0]) + 1)
    seconds = time.monotonic() - began
    return {"event": event, "nodes": nodes, "seconds": round(seconds, 1), "redone": max(0, reached - origin)}


def starts_of(run):
    """Return checkpoint and number of nodes of each start of an elastic run, as its first node logs them."""
    return [
        (int((re.findall(r"checkpoint (\d+)", event["cause"]) or [0])[0]), event["nodes"])
        for event in events_of(run)
        if event["event"] == "start" and event.get("first_rank") == 0
    ]


def node_pids(run, *, since=0):
    """Return the processes of the nodes that are there, of the events from a number on."""
    told = [event for event in events_of(run)[since:] if "node" not in event]  # by the launcher
    numbers = [(e["event"], [int(n) for n in re.findall(r"\d+", e["cause"])]) for e in told]
    gone = {found[0] for event, found in numbers if event in ("lost", "left")}
    return [found[1] for event, found in numbers if event == "node" and found[0] not in gone]
