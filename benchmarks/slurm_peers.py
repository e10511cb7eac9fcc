"""What does a Slurm job lose when it is pre-empted, loses a node, or reaches its time limit?

    python benchmarks/slurm_peers.py --out benchmarks/results      # about ten minutes, as root, with Slurm

On a real Slurm of four nodes, which are processes of this machine (tests/slurm_cluster.py), two jobs of two
nodes meet the same three events:

    penstock     `penstock launch slurm`
    torchrun     an sbatch script with `srun torchrun` and --requeue, as PyTorch's examples have it, around a
                 loop with snapshots (slurm_peers_loop.py)

Both keep a checkpoint every 20 steps. A row for each event says how many steps were trained again, which
tokens of the final model's history were seen twice, and whether a person had to submit the job again.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from peers_accounts import LoopAccounts, RunAccounts, command, make_corpus, say
from results_file import SHARED, file_result

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the set-up of the tests

from tests.launched import wait_until, write_recipe
from tests.slurm_cluster import free_ports, slurm_cluster, why_absent

EVERY, STEPS_BETWEEN, GRACE_S = 20, 30, 20
EVENTS = ("pre-empted", "node lost", "time limit")
MANY = 1_000_000

SCRIPT = """#!/bin/bash
#SBATCH --job-name=torchrun
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --partition=low
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/slurm.out
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo
srun {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --max-restarts 3 \\
  --rdzv-id $SLURM_JOB_ID --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} \\
  {loop} {folder} --steps {steps} --every {every}
"""


class Torchrun:
    """The plain job."""

    name = "torchrun"

    def __init__(self, slurm, folder):
        self._slurm, self.accounts = slurm, LoopAccounts(folder)
        folder.mkdir()
        self._script = folder / "job.sbatch"
        (port,) = free_ports(1)
        loop = Path(__file__).with_name("slurm_peers_loop.py")
        self._script.write_text(
            SCRIPT.format(folder=folder, python=sys.executable, port=port, loop=loop, steps=MANY, every=EVERY)
        )

    def submit(self):
        """Submit the job; return its id."""
        done = self._slurm.run("sbatch", "--parsable", str(self._script))
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


class Penstock:
    """Ours."""

    name = "penstock"

    def __init__(self, slurm, folder):
        self._slurm, self._run = slurm, folder / "run"
        self.accounts = RunAccounts(self._run)
        folder.mkdir()
        make_corpus(folder / "corpus")
        self._recipe = write_recipe(
            folder / "recipe.toml", folder / "corpus", run=self._run, steps=MANY, every=EVERY
        )

    def submit(self):
        """Submit the job; return its id."""
        words = ("--nodes", 2, "--partition", "low", "--grace", GRACE_S, "--doctor", "skip")
        command("launch", "slurm", self._recipe, *words, env=self._slurm.environment)
        return json.loads((self._run / "launch" / "job.json").read_text())["ident"]


def measure(slurm, peer):
    """Let a job meet the events; return a row for each."""
    job, rows = peer.submit(), []
    for event in EVENTS:
        await_steps(peer, peer.accounts.newest() + STEPS_BETWEEN)
        starts, repeated = len(peer.accounts.resumed()), peer.accounts.tokens_repeated()
        happen(slurm, event, job)
        reached = peer.accounts.newest()
        by_person = not wait_for_start(slurm, peer, job, starts)
        if by_person:
            job = peer.submit()
        wait_until(lambda seen=starts: len(peer.accounts.resumed()) > seen, "a new start", patience_s=120)
        resumed = peer.accounts.resumed()[starts]
        await_steps(peer, 2 * resumed + 5)  # until a loop that began its data again has caught up
        rows.append(
            {
                "peer": peer.name,
                "event": event,
                "steps_redone": max(0, reached - resumed),
                "tokens_repeated": max(0, peer.accounts.tokens_repeated() - repeated),
                "submitted_by_a_person": by_person,
            }
        )
        say(rows[-1])
    slurm.run("scancel", job)
    wait_until(lambda: not state_of(slurm, job), "the end of the job", patience_s=120)
    return rows


def happen(slurm, event, job):
    """Let an event happen to a job, to the end of this start of it."""
    if event == "pre-empted":
        slurm.run("sbatch", "-p", "high", "-N", "4", "--wrap", "sleep 1", cwd=slurm.folder)
    elif event == "node lost":
        nodes = slurm.run("squeue", "-h", "-j", job, "-o", "%N").stdout.strip()
        lost = slurm.run("scontrol", "show", "hostnames", nodes).stdout.split()[-1]
        slurm.kill_node(lost)
    else:
        elapsed = slurm.run("squeue", "-h", "-j", job, "-o", "%M").stdout.strip().split(":")
        minutes = (60 * int(elapsed[-2]) + int(elapsed[-1]) + GRACE_S + 5) // 60 + 1
        slurm.run("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    wait_until(lambda: state_of(slurm, job) != "RUNNING", f"{event}", patience_s=180)


def wait_for_start(slurm, peer, job, starts):
    """Return whether the job starts again by itself; False once Slurm no longer has it."""
    end = time.monotonic() + 240
    while time.monotonic() < end:
        if len(peer.accounts.resumed()) > starts:
            return True
        state = state_of(slurm, job)
        if not state:
            return False
        if state == "PENDING":
            slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=60")
        time.sleep(0.5)
    return False


def state_of(slurm, job):
    """Return the state of a job in Slurm's words; empty once it has ended."""
    return slurm.run("squeue", "-h", "-j", job, "-o", "%T").stdout.strip()


def await_steps(peer, step):
    """Wait until a job has reached a step."""
    wait_until(lambda: peer.accounts.newest() >= step, f"step {step} of {peer.name}", patience_s=180)


def main():
    """Run both jobs; file the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("penstock", "torchrun"))
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    arguments = parser.parse_args()
    if absent := why_absent():
        sys.exit(absent)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    for peer in (Torchrun, Penstock):
        if arguments.only in (None, peer.name):
            folder = Path(tempfile.mkdtemp(prefix="sp", dir="/tmp"))  # sockets need a short path
            try:
                with slurm_cluster(folder) as slurm:
                    rows += measure(slurm, peer(slurm, folder / "job"))
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    if arguments.out:
        file_result(arguments.out, "slurm_peers", {"note": SHARED, "rows": rows}, packages=("torch",))


if __name__ == "__main__":
    main()
