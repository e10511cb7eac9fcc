"""Does an elastic run survive everything that happens to a cluster, and lose or repeat no token?

    sudo python benchmarks/chaos.py --minutes 30 --out benchmarks/results

Three nodes of this machine train a tiny model (`penstock launch local --nodes 1:3`) while faults are
injected: in rounds, each round all kinds in an order drawn from a seed, at moments drawn too.

    rank, node, launcher killed        SIGKILL; a launcher is started again by the same command
    rank, node, launcher terminated    SIGTERM
    rank, node paused                  SIGSTOP, and SIGCONT after seconds: for a node, after it was missed
    rank stopped                       SIGSTOP for good, until the watchdog of the others ends the start
    node joins                         after one has gone
    checkpoint damaged                 a byte of the newest is altered and its writer killed
    disk full                          the run's file system has no byte left for some seconds
    slow card                          the nodes' network is limited to 4 Mbit/s for some seconds (tc)

A fault is survived if training gets to a step that it had not reached, without a person. At the end the run
is resumed and finishes. `penstock data audit` computes the uninterrupted order and compares every sample.

    goodput        seconds of the steps that count, of all seconds: starts, saves and steps redone are not
    redone         steps that were trained again, as the run's metrics go back; of a fault: until the next

The last two kinds need root: the benchmark then runs in namespaces of its own for network, mounts and
processes. Without it they are left out, and the benchmark says so.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from results_file import SHARED, file_result

from penstock.obs.sinks.jsonl import read_records

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the set-up of the tests

from tests.launched import events_of, node_pids, ranks_of, records_of, write_recipe

MIN_NODES, MAX_NODES = 1, 3
ROWS, TOKENS_A_ROW = 12, 32  # of a step: those of `write_recipe`
GRACE_S, HANG_S = 30, 15
PATIENCE_S = 180.0
DISK_MIB = 256
PRIVATE = "PENSTOCK_CHAOS_PRIVATE"


class Progress(threading.Thread):
    """Newest step of a run, and how many steps were trained again."""

    def __init__(self, run):
        super().__init__(daemon=True)
        self._path = run / "metrics.jsonl"
        self._last = 0
        self._ends = threading.Event()
        self.reached, self.redone = 0, 0

    def run(self):
        """Look until `stop`."""
        while not self._ends.wait(0.02):
            self._look()

    def stop(self):
        """Look for the last time."""
        self._ends.set()
        self.join()
        self._look()

    def _look(self):
        last = self._newest()
        self.redone += max(0, self._last - last)
        self._last, self.reached = last, max(self.reached, last)

    def _newest(self):
        try:
            with self._path.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 16384))
                lines = file.read().splitlines(keepends=True)
        except OSError:
            return 0
        for line in reversed(lines):
            with suppress(ValueError):
                record = json.loads(line) if line.endswith(b"\n") else {}
                if "loss" in record:
                    return record["step"]
        return 0


@dataclass
class Job:
    """A launched run, and what is done to it."""

    recipe: Path
    run: Path
    draw: random.Random
    progress: Progress
    launcher: subprocess.Popen | None = None
    ends: list = field(default_factory=list)
    """Exit codes of launchers."""
    _seen: int = 0

    def start(self, *words):
        """Start the launcher."""
        command = [sys.executable, "-m", "penstock", "launch", "local", str(self.recipe), *words]
        self._seen = len(events_of(self.run))
        with (self.recipe.parent / "launcher.out").open("ab") as out:
            self.launcher = subprocess.Popen(
                [*command, "--nodes", f"{MIN_NODES}:{MAX_NODES}", "--grace", str(GRACE_S)],
                stdout=out,
                stderr=out,
            )

    def ended(self):
        """Return the exit code of a launcher that has ended by itself."""
        return self.launcher.poll()

    def nodes(self):
        """Return the processes of the nodes of this launcher, which has started."""
        return [pid for pid in node_pids(self.run, since=self._seen) if Path(f"/proc/{pid}").exists()]

    def rank(self):
        """Return the process of a rank, any of them; waits until there is one."""
        return self.draw.choice(sorted(await_(lambda: ranks_of(self.run)).values()))

    def node(self):
        """Return the process of a node, any of them."""
        return self.draw.choice(await_(self.nodes))

    def launch_again(self):
        """Wait for the end of the launcher, and type the same command again."""
        self.ends.append(self.launcher.wait(PATIENCE_S))
        self.start()


def await_(is_so, patience_s=PATIENCE_S):
    """Return what a function returns once it is true; None after too long."""
    end = time.monotonic() + patience_s
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def send(number):
    """Return a function that sends a signal to a process that may be gone."""

    def act(pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    return act


kill, terminate, stop, go_on = map(send, (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGCONT))


def descendants(pid):
    """Return a process and all below it."""
    found = [pid]
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += descendants(int(child))
    return found


def pause_rank(job):
    pid = job.rank()
    stop(pid)
    time.sleep(job.draw.uniform(2, 8))
    go_on(pid)


def pause_node(job):
    frozen = descendants(job.node())
    for pid in frozen:
        stop(pid)
    time.sleep(job.draw.uniform(18, 24))  # longer than its heartbeats are waited for
    for pid in frozen:
        go_on(pid)


def join_node(job):
    nodes = len(job.nodes())
    if nodes == MAX_NODES:
        terminate(job.node())
        await_(lambda: len(job.nodes()) < MAX_NODES)
        nodes -= 1
    (job.run / "launch" / "request.json").write_text(json.dumps({"nodes": nodes + 1}))
    await_(lambda: len(job.nodes()) > nodes or job.ended() is not None)


def kill_launcher(job):
    kill(job.launcher.pid)
    job.launch_again()


def terminate_launcher(job):
    terminate(job.launcher.pid)
    job.launch_again()


def damage_checkpoint(job):
    # a run stops at a damaged first one, rather than start again in silence
    await_(lambda: len([*(job.run / "checkpoints").glob("step-*")]) > 1)
    pid = await_(lambda: ranks_of(job.run).get(0))
    stop(pid)
    newest = max((job.run / "checkpoints").glob("step-*"))
    shard = max(newest.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0xFF]))
    kill(pid)


def fill_disk(job):
    filler = job.run.parent / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while True:
            os.write(file.fileno(), bytes(1 << 16))
    time.sleep(job.draw.uniform(3, 8))
    filler.unlink()


def slow_card(job):
    device = ("dev", "lo", "root")
    subprocess.run(
        ["tc", "qdisc", "add", *device, "tbf", "rate", "4mbit", "burst", "128kb", "latency", "500ms"],
        check=True,
    )
    time.sleep(job.draw.uniform(4, 10))
    subprocess.run(["tc", "qdisc", "del", *device], check=True)


FAULTS: dict[str, Callable[[Job], object]] = {
    "rank killed": lambda job: kill(job.rank()),
    "rank terminated": lambda job: terminate(job.rank()),
    "rank paused": pause_rank,
    "rank stopped": lambda job: stop(job.rank()),
    "node killed": lambda job: kill(job.node()),
    "node terminated": lambda job: terminate(job.node()),
    "node paused": pause_node,
    "node joins": join_node,
    "launcher killed": kill_launcher,
    "launcher terminated": terminate_launcher,
    "checkpoint damaged": damage_checkpoint,
    "disk full": fill_disk,
    "slow card": slow_card,
}
NEED_ROOT = {"disk full", "slow card"}
NO_NEW_START = {"rank paused", "disk full", "slow card"}
"""Kinds after which the ranks may go on as they are."""


def inject(job, kind):
    """Inject a fault, and wait for a step that the run had not reached; return what happened."""
    time.sleep(job.draw.uniform(0.5, 5))
    reached, redone_before, began = job.progress.reached, job.progress.redone, time.monotonic()
    start = newest_start(job.run)
    FAULTS[kind](job)
    lasted = time.monotonic() - began
    target = job.progress.reached + 1

    def is_past():
        is_started = kind in NO_NEW_START or newest_start(job.run) != start
        return is_started and job.progress.reached >= target and job.ended() is None

    await_(lambda: is_past() or job.ended() is not None)
    is_survived = is_past()
    row = {
        "kind": kind,
        "at_step": reached,
        "survived": is_survived,
        "lasted_s": round(lasted, 1),
        "seconds": round(time.monotonic() - began, 1),
        "redone_before": redone_before,
        "nodes": len(job.nodes()),
    }
    if not is_survived:
        row |= {"code": job.ended(), "last_events": events_of(job.run)[-20:]}
    return row


def newest_start(run):
    """Return the record that the newest ranks wrote when they began, after the metrics went back."""
    records = reversed(read_records(run / "metrics.jsonl"))
    return next((record for record in records if record.get("event") == "start"), None)


def repair(job):
    """Do what a person does after a fault that the run did not survive, or that took nodes."""
    if job.ended() is None and job.progress.reached and not job.nodes():
        kill(job.launcher.pid)
    if job.ended() is not None:
        job.launch_again()
    await_(lambda: job.nodes())
    if len(job.nodes()) == MIN_NODES:
        (job.run / "launch" / "request.json").write_text(json.dumps({"nodes": MAX_NODES}))
        await_(lambda: len(job.nodes()) == MAX_NODES or job.ended() is not None)


def chaos(folder, *, minutes, seed, kinds):
    """Run the rounds; return what is filed."""
    corpus, disk = folder / "corpus", folder / "disk"
    disk.mkdir()
    if os.environ.get(PRIVATE):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "chaos", disk], check=True)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    penstock(
        *("data", "prepare", Path(json.__file__).parent),
        *("--train-tokenizer", 400, "--max-errors", 9, "--out", corpus),
    )
    run = disk / "run"
    recipe = write_recipe(folder / "recipe.toml", corpus, run=run, steps=10_000_000, every=20)
    recipe.write_text(f"{recipe.read_text()}[guard]\nhang_s = {HANG_S}\n")
    draw, progress, rows = random.Random(seed), Progress(run), []
    job = Job(recipe, run, draw, progress)
    began = time.monotonic()
    progress.start()
    job.start()
    if not await_(lambda: progress.reached > 5):
        sys.exit((folder / "launcher.out").read_text()[-3000:])
    while not rows or time.monotonic() - began < 60 * minutes:
        for kind in draw.sample(kinds, len(kinds)):
            rows.append(inject(job, kind))
            say(time.monotonic() - began, rows[-1])
            repair(job)
            if time.monotonic() - began >= 60 * minutes and len(rows) >= len(kinds):
                break
    terminate(job.launcher.pid)
    job.ends.append(job.launcher.wait(PATIENCE_S))
    job.start("--set", f"run.steps={progress.reached + 40}")
    code = job.launcher.wait(PATIENCE_S)
    seconds = time.monotonic() - began
    progress.stop()
    marks = [*(row.pop("redone_before") for row in rows), progress.redone]
    for row, (before, after) in zip(rows, pairwise(marks), strict=True):
        row["redone"] = after - before
    return {
        "seed": seed,
        "minutes": round(seconds / 60, 1),
        "finished": code == 0,
        "code": code,
        "exit_codes_of_launchers": job.ends,
        "faults": by_kind(rows),
        "steps": progress.reached,
        "steps_redone": progress.redone,
        "goodput": round(seconds_of_steps(run) / seconds, 3),
        **tokens_of(run, progress.reached),
        "rows": rows,
    }


def penstock(*words):
    """Run a command; return how it ended."""
    command = [sys.executable, "-m", "penstock", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def by_kind(rows):
    """Return for each kind how many faults were injected and survived, and what they cost."""
    found = {}
    for kind in FAULTS:
        mine = [row for row in rows if row["kind"] == kind]
        if mine:
            found[kind] = {
                "injected": len(mine),
                "survived": sum(row["survived"] for row in mine),
                "redone": sum(row["redone"] for row in mine),
                "median_s": sorted(row["seconds"] for row in mine)[len(mine) // 2],
            }
    return found


def seconds_of_steps(run):
    """Return the seconds of all steps that count: metrics go back with the run."""
    return sum(record["step_s"] for record in records_of(run))


def tokens_of(run, steps):
    """Return the tokens that were lost and repeated, and the audit: every sample against its order."""
    done = penstock("data", "audit", run, "--json")
    if done.returncode not in (0, 1):
        return {"audit": {"error": done.stderr}, "tokens_lost": None, "tokens_repeated": None}
    audit = json.loads(done.stdout)
    numbers = [record["step"] for record in records_of(run)]
    samples = steps * ROWS
    wrong = audit["num_faults"] * ROWS
    return {
        "tokens": audit["tokens"],
        "tokens_lost": (max(0, samples - audit["samples"]) + wrong) * TOKENS_A_ROW,
        "tokens_repeated": (max(0, audit["samples"] - samples) + wrong) * TOKENS_A_ROW,
        "steps_recorded_once": numbers == list(range(1, steps + 1)),
        "audit": audit,
    }


def say(seconds, row):
    """Print a fault."""
    state = "survived" if row["survived"] else f"NOT SURVIVED (exit code {row['code']})"
    print(
        f"{seconds / 60:5.1f} min  {row['kind']:<20} {state}  {row['seconds']:5.1f} s  "
        f"at step {row['at_step']}, {row['nodes']} nodes",
        flush=True,
    )


def in_namespaces():
    """Start this program again in namespaces of its own, if that is allowed; return only if it is not."""
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if shutil.which("unshare") is None or shutil.which("tc") is None:
        return
    if subprocess.run([*words, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[PRIVATE] = "1"
        os.execvp(words[0], [*words, sys.executable, *sys.argv])


def main():
    """Run the faults; return 1 if one was not survived, or a token was lost or repeated."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="0: one round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="KIND")
    parser.add_argument("--keep", type=Path, help="new folder to leave the run in")
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    arguments = parser.parse_args()
    if not os.environ.get(PRIVATE):
        in_namespaces()
    kinds = [kind for kind in arguments.only if os.environ.get(PRIVATE) or kind not in NEED_ROOT]
    if left_out := sorted(set(arguments.only) - set(kinds)):
        print(f"LEFT OUT, as this is not root with unshare and tc: {', '.join(left_out)}", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as made:
        folder = arguments.keep or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        result = chaos(folder, minutes=arguments.minutes, seed=arguments.seed, kinds=kinds)
        if arguments.keep and os.environ.get(PRIVATE):
            shutil.copytree(folder / "disk", folder / "kept")
        if os.environ.get(PRIVATE):
            subprocess.run(["umount", "--lazy", folder / "disk"], check=True)
    for kind, row in result["faults"].items():
        print(f"{kind:<20} {row['survived']} of {row['injected']} survived, {row['redone']} steps redone")
    print(
        f"{result['minutes']} min, {result['steps']} steps, {result['steps_redone']} redone, goodput "
        f"{result['goodput']:.0%}, {result['tokens_lost']} tokens lost, {result['tokens_repeated']} "
        f"repeated, {'finished' if result['finished'] else 'NOT FINISHED'}"
    )
    if arguments.out:
        file_result(
            arguments.out, "chaos", {"note": SHARED, "left_out": left_out, **result}, packages=("torch",)
        )
    is_sound = result["finished"] and result["tokens_lost"] == 0 and result["tokens_repeated"] == 0
    return 0 if is_sound and all(row["survived"] for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
