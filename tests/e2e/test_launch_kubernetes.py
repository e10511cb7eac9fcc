"""`penstock launch kubernetes` on a real control plane: pods train, are lost and resized; refusals.

The JobSet controller is a stand-in (tests/jobset_controller.py), the kubelet one that runs pods as processes.
"""

import json
import shutil

import httpx
import pytest

from penstock.launch.pods.failed import MAX_FAILED
from tests.e2e.conftest import audit_of_pods
from tests.jobset_controller import jobset_controller
from tests.kubelet import nodes
from tests.kubernetes import JOBSET, cluster
from tests.launched import newest_step, wait_until, write_recipe
from tests.serving import make_model
from tests.warm import penstock

STEPS = 60


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory, corpus):
    """A control plane with two nodes, a claim `runs` that holds a corpus, and its folder."""
    folder = tmp_path_factory.mktemp("kubernetes")
    with (
        cluster(folder, controllers=True, definitions=["jobset", "localqueues", "clusterqueues"]) as found,
        jobset_controller(found),
        nodes(found, folder, "n1", "n2") as room,
    ):
        found.volume("runs", folder / "runs")
        found.volume("disk", folder / "disk", mode="ReadWriteOnce")
        shutil.copytree(corpus, folder / "runs" / "corpus")
        yield found, room, folder / "runs"


@pytest.fixture
def launch(kubernetes, tmp_path, monkeypatch):
    """Type `penstock launch kubernetes` for a recipe of a run, in a folder that no pod sees."""
    found, _, _ = kubernetes
    config = found.kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(config))

    def launch(run, *words, steps=STEPS, volume="runs", every=5):
        recipe = write_recipe(tmp_path / f"{run}.toml", "corpus", run=run, steps=steps, every=every)
        common = ["--image", "penstock", "--volume", f"{volume}:/runs", "--cpu", "1"]
        return penstock("launch", "kubernetes", recipe, *common, *words, cwd=tmp_path)

    return launch


def state(run, cwd):
    done = penstock("launch", "status", run, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def pods_of(found, run):
    return found.all("Pod", labels=f"app.kubernetes.io/instance={run}")


@pytest.mark.timeout(600)
def test_a_run_is_resized_and_cancelled_after_saving(kubernetes, launch, tmp_path):
    found, _, runs = kubernetes
    done = launch("resized", "--nodes", 1, "--processes", 2, "--grace", 40, steps=100_000)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: newest_step(runs / "resized") >= 6, "step 6")
    resized = penstock("launch", "resize", "resized", 2, cwd=tmp_path)
    assert resized.returncode == 0, resized.stderr
    step = newest_step(runs / "resized")
    wait_until(lambda: newest_step(runs / "resized") >= step + 3, "steps of four ranks")
    said = penstock("launch", "status", "resized", cwd=tmp_path).stdout
    assert "2 running" in said
    assert f"start 1 of this node, newest checkpoint {step}" in said, said
    cancelled = penstock("launch", "cancel", "resized", cwd=tmp_path)
    assert "deleted, after a save request to its pods" in cancelled.stdout, cancelled.stderr
    assert pods_of(found, "resized") == []
    accounts = audit_of_pods(runs / "resized")
    assert (accounts["samples"], accounts["faults"]) == (accounts["steps"] * 12, [])
    assert set(accounts["ranks"]) == {2, 4}
    newest = max(
        int(path.name.removeprefix("step-")) for path in (runs / "resized" / "checkpoints").iterdir()
    )
    assert newest == newest_step(runs / "resized"), "no step was lost"


@pytest.mark.timeout(600)
def test_an_elastic_run_ends_with_its_last_step_though_a_pod_waits_for_a_node(kubernetes, launch, tmp_path):
    found, _, runs = kubernetes
    done = launch("short", "--nodes", "1:3", "--cpu", 8)  # a node has eight, and there are two
    assert done.returncode == 0, done.stderr
    wait_until(lambda: newest_step(runs / "short") >= STEPS, "the last step")
    wait_until(lambda: not state("short", tmp_path)["is_live"], "the end of the run", every_s=0.5)
    ended = state("short", tmp_path)
    assert (ended["status"], ended["step"], ended["checkpoint"]) == ("COMPLETED", STEPS, STEPS), ended
    assert ended["tokens_per_s"] > 0
    told = {event["event"] for event in ended["events"]}
    assert {"submitted", "start", "finish"} <= told, "those of the pods, too"
    accounts = audit_of_pods(runs / "short")
    assert (accounts["samples"], accounts["faults"]) == (STEPS * 12, [])
    wait_until(
        lambda: all(pod["status"]["phase"] == "Succeeded" for pod in pods_of(found, "short")),
        "no pod left",
        every_s=0.2,
    )


@pytest.mark.timeout(600)
def test_a_run_lives_on_while_pods_fail_between_checkpoints_and_ends_when_they_fail_before_one(
    kubernetes, launch, tmp_path
):
    found, room, runs = kubernetes
    done = launch("killed", "--nodes", 1, steps=100_000, every=90_000)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: newest_step(runs / "killed") >= 1, "a step")
    saved = penstock("control", runs / "killed", "--save", cwd=tmp_path)
    assert saved.returncode == 0, saved.stderr
    wait_until(lambda: any((runs / "killed" / "checkpoints").glob("step-*")), "a whole checkpoint")
    note, killed, noted = runs / "killed" / "launch" / "pods" / "node-00000.json", set(), []

    def kill():
        count = json.loads(note.read_text())
        running = {pod["metadata"]["name"] for pod in pods_of(found, "killed") if is_running(pod)} - killed
        if running and count not in noted and count["failed"] < MAX_FAILED:  # it has begun
            noted.append(count)
            killed.update(running)
            room.kill_pod("default", *running)
        return "Failed" in str(found.get("JobSet", "killed", api=JOBSET).get("status"))

    wait_until(kill, "the end of a run whose pods are killed as they start", every_s=0.2)
    assert len(killed) == MAX_FAILED + 1, "the first had written a checkpoint; the last ended by itself"
    assert state("killed", tmp_path)["status"] == "FAILED"
    assert "6 pods of node 0 failed in a row without a new checkpoint" in events_text(runs / "killed")


def is_running(pod):
    return pod["status"].get("phase") == "Running"


def events_text(run):
    return (run / "launch" / "events.jsonl").read_text()


@pytest.mark.timeout(600)
def test_a_server_answers_once_it_is_ready_and_ends_its_answers_when_its_pod_is_deleted(
    kubernetes, tmp_path, monkeypatch
):
    found, _, runs = kubernetes
    for file in make_model(runs / "model").iterdir():
        file.chmod(0o644)  # weights are written for their owner only, and pods run as another user
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
    serve = ["launch", "server", "model", "--image", "penstock", "--volume", "runs:/runs"]
    refused = penstock(*serve, cwd=tmp_path)
    assert "A server that other machines reach needs a key" in one_paragraph(refused, 2)
    serve += ["--server=--insecure", "--cpu", 1, "--grace", 40]
    refused = penstock(*serve, "--server=--treads=1", cwd=tmp_path)
    assert "unrecognized arguments: --treads=1" in one_paragraph(refused, 2)
    shown = penstock(*serve, "--dry-run", cwd=tmp_path)
    assert "would take 2 objects" in shown.stdout, shown.stderr
    done = penstock(*serve, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert found.get("Service", "model")["spec"]["ports"][0]["port"] == 8000

    def ready():
        pods = pods_of(found, "model")
        return [pod for pod in pods if is_ready(pod)]

    wait_until(ready, "a pod that is ready", patience_s=90, every_s=0.2)
    (pod,) = ready()
    url = f"http://{pod['status']['podIP']}:8000/v1/completions"
    asked = {"model": "model", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", url, json=asked, timeout=60) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        first = next(lines)
        found.delete("Pod", pod["metadata"]["name"])
        *_, last, end = [first, *lines]
    assert end == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    others = lambda: [one for one in ready() if one["metadata"]["name"] != pod["metadata"]["name"]]  # noqa: E731
    wait_until(others, "another pod", every_s=0.2)
    found.delete("Deployment", "model", api="apps/v1")


def is_ready(pod):
    conditions = pod["status"].get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def one_paragraph(done, code):
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert "\n\n" not in done.stderr.strip()
    return " ".join(done.stderr.split())


def test_what_could_never_start_is_refused_and_nothing_is_left(kubernetes, launch, tmp_path, monkeypatch):
    found, _, _ = kubernetes
    said = one_paragraph(launch("bad", "--nodes", 2, volume="disk"), 2)
    assert "Claim disk is ReadWriteOnce" in said
    assert "no PersistentVolumeClaim rums" in one_paragraph(launch("bad", volume="rums"), 2)
    assert "no Secret wandb" in one_paragraph(launch("bad", "--secret", "KEY=key:wandb/key"), 2)
    assert "no LocalQueue" in one_paragraph(launch("bad", "--queue", "research"), 2)
    assert "at most 48 lower-case letters" in one_paragraph(launch("bad", "--name", "Bad"), 2)
    said = one_paragraph(launch("bad", "--namespace", "nowhere", volume="runs"), 2)
    assert "no PersistentVolumeClaim runs" in said
    said = one_paragraph(launch("bad", "--api", "trainjob"), 1)
    assert "does not know trainer.kubeflow.org/v1alpha1" in said
    cards = tmp_path / "cards.toml"
    cards.write_text('[[networks]]\nmaster = "ens1"\nsubnet = "10.1.0.0/24"\n')
    assert "does not know k8s.cni.cncf.io/v1" in one_paragraph(launch("bad", "--networks", cards), 1)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert "No cluster is configured" in one_paragraph(launch("bad"), 1)
    away = json.loads((tmp_path / "kubeconfig").read_text())
    away["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "away").write_text(json.dumps(away))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "away"))
    assert "The cluster at https://127.0.0.1:1 cannot be reached" in one_paragraph(launch("bad"), 1)
    assert not (tmp_path / "bad" / "launch" / "job.json").exists()
    assert found.get("ConfigMap", "bad") is None
    assert found.get("JobSet", "bad", api=JOBSET) is None


def test_a_queue_that_can_never_give_the_nodes_is_refused_with_both_amounts(kubernetes, launch):
    found, _, _ = kubernetes
    kueue = "kueue.x-k8s.io/v1beta2"
    flavor = {"name": "any", "resources": [{"name": "cpu", "nominalQuota": "3"}]}
    groups = [{"coveredResources": ["cpu"], "flavors": [flavor]}]
    for one in (
        {"kind": "ClusterQueue", "metadata": {"name": "small"}, "spec": {"resourceGroups": groups}},
        {
            "kind": "LocalQueue",
            "metadata": {"name": "small", "namespace": "default"},
            "spec": {"clusterQueue": "small"},
        },
    ):
        status, answer = found.create({"apiVersion": kueue, **one})
        assert status == 201, answer
    said = one_paragraph(launch("bad", "--nodes", 4, "--queue", "small"), 2)
    assert "Queue small gives at most 3 of cpu" in said
    shown = launch("bad", "--nodes", 3, "--queue", "small", "--dry-run")
    assert "kueue.x-k8s.io/queue-name: small" in shown.stdout
