"""What does a JobSet lose when it is pre-empted, loses a node, or reaches its time limit?

    KUBEBUILDER_ASSETS=... python benchmarks/jobset_peers.py --out benchmarks/results    # ten minutes, root

On a Kubernetes control plane of this machine, whose scheduler is real, and whose pods are processes
(tests/kubelet.py), two JobSets of two pods meet the same three events, each event with a job of its own:

    penstock     `penstock launch kubernetes`
    torchrun     a JobSet as JobSet's examples have it: an Indexed Job of torchrun with backoffLimit 0, which
                 the JobSet starts again (maxRestarts), around a loop with snapshots (slurm_peers_loop.py)

Both keep a checkpoint every 20 steps. A row says how many steps were trained again, which tokens of the final
model's history were seen twice, and whether a person had to submit the job again. JobSet's controller is a
stand-in (tests/jobset_controller.py) that knows its rules but no back-off: seconds are not filed.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from peers_accounts import LoopAccounts, RunAccounts, command, make_corpus, say
from results_file import SHARED, file_result

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the set-up of the tests

from tests.jobset_controller import jobset_controller
from tests.kubelet import nodes
from tests.kubernetes import JOBSET, cluster
from tests.launched import wait_until, write_recipe

EVERY, STEPS_BETWEEN, GRACE_S, LIMIT_S = 20, 30, 20, 150
EVENTS = ("pre-empted", "node lost", "time limit")
MANY = 1_000_000
NODES = ("n1", "n2", "n3")
PORT = 29_500


class Torchrun:
    """The plain JobSet."""

    name = "torchrun"

    def __init__(self, found, folder):
        self._cluster, self._folder = found, folder

    def submit(self, job, limit_s):
        """Create the JobSet; return its accounts."""
        run = self._folder / "runs" / job
        run.mkdir()
        run.chmod(0o777)
        loop = Path(__file__).with_name("slurm_peers_loop.py")
        shutil.copy(loop, self._folder / "runs" / "loop.py")
        words = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *("--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={job}-workers-0-0.{job}"),
            *(f"--master-port={PORT}", "--max-restarts=3", "/runs/loop.py", f"/runs/{job}"),
            *(f"--steps={MANY}", f"--every={EVERY}"),
        ]
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HOME": "/tmp"}
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": GRACE_S,
            "containers": [
                {
                    "name": "trainer",
                    "image": "test",
                    "command": words,
                    "env": [{"name": name, "value": value} for name, value in variables.items()],
                    "resources": {"requests": {"cpu": "5"}},
                    "volumeMounts": [{"name": "runs", "mountPath": "/runs"}],
                }
            ],
            "volumes": [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}],
        }
        template = {
            "spec": {
                "completionMode": "Indexed",
                "completions": 2,
                "parallelism": 2,
                "backoffLimit": 0,
                "template": {"spec": pod},
                **({"activeDeadlineSeconds": limit_s} if limit_s else {}),
            }
        }
        status, answer = self._cluster.create(
            {
                "apiVersion": JOBSET,
                "kind": "JobSet",
                "metadata": {"name": job, "namespace": "default"},
                "spec": {
                    "failurePolicy": {"maxRestarts": 3},
                    "replicatedJobs": [{"name": "workers", "template": template}],
                },
            }
        )
        assert status == 201, answer
        return LoopAccounts(run)


class Penstock:
    """Ours."""

    name = "penstock"

    def __init__(self, found, folder):
        self._cluster, self._folder = found, folder
        make_corpus(folder / "runs" / "corpus")

    def submit(self, job, limit_s):
        """Launch the run; return its accounts."""
        recipe = write_recipe(self._folder / f"{job}.toml", "corpus", run=job, steps=MANY, every=EVERY)
        config = self._cluster.kubeconfig(self._folder / "kubeconfig")
        words = ["--image", "test", "--volume", "runs:/runs", "--cpu", "5", "--nodes", 2, "--grace", GRACE_S]
        words += ["--time-limit", f"{limit_s}s"] if limit_s else []
        environment = os.environ | {"KUBECONFIG": str(config)}
        command("launch", "kubernetes", recipe, *words, cwd=self._folder, env=environment)
        return RunAccounts(self._folder / "runs" / job)


def measure(found, room, peer, event):
    """Let a job meet an event; return its row."""
    job = f"{peer.name}-{event.replace(' ', '-')}"
    accounts = peer.submit(job, LIMIT_S if event == "time limit" else 0)
    await_steps(accounts, STEPS_BETWEEN)
    starts = len(accounts.resumed())
    reached = happen(found, room, event, job, accounts)
    by_person = not starts_again(found, job, accounts, starts)
    if not by_person:
        await_steps(
            accounts, 2 * accounts.resumed()[starts] + 5
        )  # until a loop that began again has caught up
    found.delete("JobSet", job, api=JOBSET)
    wait_until(lambda: not pods_of(found, job), "the end of the job", patience_s=120)
    config = accounts.folder / "config.json"
    if config.is_file():  # with paths as pods see them
        config.write_text(config.read_text().replace('"/runs/', f'"{accounts.folder.parent}/'))
    row = {
        "peer": peer.name,
        "event": event,
        "steps_redone": 0 if by_person else max(0, reached - accounts.resumed()[starts]),
        "tokens_repeated": 0 if by_person else accounts.tokens_repeated(),
        "submitted_by_a_person": by_person,
    }
    say(row)
    return row


def happen(found, room, event, job, accounts):
    """Let an event happen; return the newest step then."""
    (first, *others) = pods_of(found, job)
    if event == "pre-empted":
        for number in range(2):  # one node is free
            urgent(found, f"urgent-{job}-{number}")
        wait_until(lambda: _changed(found, job, (first, *others)), "pre-emption", patience_s=120)
        reached = accounts.newest()
        for number in range(2):
            found.delete("Pod", f"urgent-{job}-{number}", grace_s=0)
        return reached
    if event == "node lost":
        lost = others[0]["spec"]["nodeName"]
        reached = accounts.newest()
        room.lose(lost)
        found.delete("Node", lost)
        for pod in found.all("Pod"):
            if pod["spec"].get("nodeName") == lost:  # Kubernetes' garbage collector waits 40 s before it does
                found.delete("Pod", pod["metadata"]["name"], grace_s=0)
        return reached
    newest = [accounts.newest()]

    def is_over():
        newest.append(accounts.newest())
        return _changed(found, job, (first, *others))

    wait_until(is_over, "the time limit", patience_s=LIMIT_S + 60)
    return max(newest[-1], accounts.newest())


def _changed(found, job, before):
    known = {pod["metadata"]["uid"] for pod in before}
    now = [pod for pod in pods_of(found, job) if pod["metadata"]["uid"] in known]
    return len(now) < len(before) or any(pod["status"].get("phase") != "Running" for pod in now)


def urgent(found, name):
    """Create a pod for whom the scheduler pre-empts others."""
    found.create(
        {
            "apiVersion": "scheduling.k8s.io/v1",
            "kind": "PriorityClass",
            "metadata": {"name": "urgent"},
            "value": 1000,
        }
    )
    container = {
        "name": "main",
        "image": "test",
        "command": ["sleep", "1000"],
        "resources": {"requests": {"cpu": "5"}},
    }
    spec = {"priorityClassName": "urgent", "terminationGracePeriodSeconds": 1, "containers": [container]}
    status, answer = found.create(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}
    )
    assert status == 201, answer


def pods_of(found, job):
    """Return the pods of a job by their index."""
    pods = found.all("Pod", labels=f"jobset.sigs.k8s.io/jobset-name={job}")
    return sorted(pods, key=lambda pod: pod["metadata"]["name"])


def starts_again(found, job, accounts, starts):
    """Return whether the job trains again by itself; False once its JobSet has ended."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if len(accounts.resumed()) > starts:
            return True
        if found.get("JobSet", job, api=JOBSET).get("status", {}).get("terminalState"):
            return False
        time.sleep(0.5)
    return False


def await_steps(accounts, step):
    """Wait until a job has reached a step."""
    wait_until(lambda: accounts.newest() >= step, f"step {step}", patience_s=600)


def main():
    """Run both jobs; file the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("penstock", "torchrun"))
    parser.add_argument("--out", type=Path, help="folder to file the result in")
    arguments = parser.parse_args()
    if not os.environ.get("KUBEBUILDER_ASSETS"):
        sys.exit("NO KUBERNETES: set KUBEBUILDER_ASSETS to a folder with kube-apiserver and the others")
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory(prefix="jobset-peers-") as name:
        folder = Path(name)
        with (
            cluster(folder, controllers=True, definitions=["jobset"]) as found,
            jobset_controller(found),
            nodes(found, folder, *NODES) as room,
        ):
            found.volume("runs", folder / "runs")
            for kind in (Torchrun, Penstock):
                if arguments.only in (None, kind.name):
                    peer = kind(found, folder)
                    for event in EVENTS:
                        rows.append(measure(found, room, peer, event))
                        for node in NODES:  # one may have been lost
                            if found.get("Node", node) is None:
                                room.add(node)
    if arguments.out:
        file_result(arguments.out, "jobset_peers", {"note": SHARED, "rows": rows}, packages=("torch",))


if __name__ == "__main__":
    main()
