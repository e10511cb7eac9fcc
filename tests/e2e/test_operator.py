"""`penstock operator` on a real control plane, in pods of its own Deployment, with its own rights."""

import random
import shutil
import subprocess
import time
from pathlib import Path

import kubernetes_validate as validate
import pytest
import yaml

from tests.e2e.conftest import audit_of_pods
from tests.jobset_controller import jobset_controller
from tests.kubelet import nodes
from tests.kubernetes import JOBSET, MERGE, binary, cluster
from tests.launched import newest_step, records_of, starts_of, wait_until, write_recipe

FOLDER = Path(__file__).parents[2] / "deploy" / "operator"
NAMESPACE = "penstock"
API = "penstock.dev/v1alpha1"
PATIENCE_S = 120.0
OVERLAY = """\
resources: [operator]
patches:
  - target: {kind: Deployment}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --every=0.5}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --lease=4}
"""


def steps_of(run):
    """Return the steps of a run in the order in which they were trained, repeated ones twice."""
    return [record["step"] for record in records_of(run)]


def manifests():
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {*names, "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    return [found for name in names for found in yaml.safe_load_all((FOLDER / name).read_text())]


@pytest.fixture(autouse=True)
def leaves_no_process():
    """Let pods outlive a test: a container that ends is started again. The cluster kills all at its end."""


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory):
    """A cluster of two nodes in which two replicas of the operator run."""
    folder = tmp_path_factory.mktemp("kubernetes")
    kubectl = binary("kubectl")
    with (
        cluster(folder, controllers=True, definitions=["jobset"]) as found,
        jobset_controller(found),
        nodes(found, folder, "n1", "n2") as room,
    ):
        config = found.kubeconfig(folder / "kubeconfig")
        shutil.copytree(FOLDER, folder / "overlay" / "operator")
        (folder / "overlay" / "kustomization.yaml").write_text(OVERLAY)
        command = [kubectl, f"--kubeconfig={config}", "apply", "-k", folder / "overlay", "--validate=false"]
        wait_until(  # the definition is not served at once
            lambda: subprocess.run(command, capture_output=True, check=False).returncode == 0, "kubectl apply"
        )
        found.volume("runs", folder / "runs", namespace=NAMESPACE)
        yield Setting(found, room, folder)


class Setting:
    def __init__(self, found, room, folder):
        self.cluster, self.room, self.folder = found, room, folder
        self.runs = folder / "runs"

    def start(self, name, corpus, *, nodes, steps=100_000, port, **spec):
        if not (self.runs / "corpus").exists():
            shutil.copytree(corpus, self.runs / "corpus")
        recipe = write_recipe(self.folder / "recipe.toml", "corpus", run=name, steps=steps)
        text = f"{recipe.read_text()}\n[measure]\nmetrics_port = {port}\n"
        wanted = {
            "image": "test",
            "recipe": text,
            "nodes": nodes,
            "grace": 30,
            "cpu": "5",  # one pod on each node
            "volumes": [{"claim": "runs", "path": "/runs"}],
        }
        run = {
            "apiVersion": API,
            "kind": "TrainingRun",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": wanted | spec,
        }
        status, answer = self.cluster.create(run)
        assert status == 201, answer

    def run(self, name):
        return self.cluster.get("TrainingRun", name, api=API, namespace=NAMESPACE)

    def status(self, name):
        return (self.run(name) or {}).get("status", {})

    def change(self, name, **spec):
        status, answer = self.cluster.patch("TrainingRun", name, {"spec": spec}, api=API, namespace=NAMESPACE)
        assert status == 200, answer

    def delete(self, name):
        self.cluster.delete("TrainingRun", name, api=API, namespace=NAMESPACE)

    def pods(self, name):
        labels = f"app.kubernetes.io/instance={name}"
        return self.cluster.all("Pod", namespace=NAMESPACE, labels=labels)

    def operators(self):
        labels = "app.kubernetes.io/name=penstock-operator"
        return [
            pod["metadata"]["name"]
            for pod in self.cluster.all("Pod", namespace=NAMESPACE, labels=labels)
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    def leader(self):
        lease = self.cluster.get(
            "Lease", "penstock-operator", api="coordination.k8s.io/v1", namespace=NAMESPACE
        )
        return lease and lease["spec"]["holderIdentity"]

    def events(self, name):
        return [
            (event["reason"], event["message"])
            for event in self.cluster.all("Event", namespace=NAMESPACE)
            if event["involvedObject"]["name"] == name and event["involvedObject"]["kind"] == "TrainingRun"
        ]

    def until(self, is_so, what, patience_s=PATIENCE_S):
        return wait_until(is_so, what, patience_s=patience_s, every_s=0.2)

    def until_step(self, name, step):
        self.until(lambda: newest_step(self.runs / name) >= step, f"step {step} of {name}")

    def until_trains_on(self, name, nodes, *, since=0):
        """Wait for steps on so many nodes, of a start after the first `since` ones; return its checkpoint."""
        run = self.runs / name
        self.until(lambda: starts_of(run)[since:] and starts_of(run)[-1][1] == nodes, f"{name} on {nodes}")
        origin = starts_of(run)[-1][0]
        self.until_step(name, origin + 4)
        return origin

    def kill_operators(self, times, *, seed):
        """Kill -9 all replicas of the operator so many times, each some moments after one of them leads."""
        draw = random.Random(seed)
        for _ in range(times):
            self.until(lambda: any(self.leads(pod) for pod in self.operators()), "a leader")
            time.sleep(draw.uniform(0.0, 2.5))
            for pod in self.operators():
                self.room.kill_pod(NAMESPACE, pod)
            time.sleep(1.0)  # until their ends are told

    def leads(self, name):
        """Return whether the process that now runs in a pod of the operator leads."""
        (container,) = self.cluster.get("Pod", name, namespace=NAMESPACE)["status"]["containerStatuses"]
        return "running" in container["state"] and "leads in" in self.cluster.log(name, namespace=NAMESPACE)

    def lose_node(self, name):
        """Cut a node's power and take its object away, and with it its pods, as a cloud does."""
        self.room.lose(name)
        self.cluster.delete("Node", name)
        for pod in self.cluster.all("Pod", namespace=NAMESPACE):
            if pod["spec"].get("nodeName") == name:  # Kubernetes' garbage collector waits 40 s before it does
                self.cluster.delete("Pod", pod["metadata"]["name"], namespace=NAMESPACE, grace_s=0)

    def nodes_of(self, name):
        """Return the nodes of the pods of a run, those that have one."""
        pods = self.pods(name)
        return {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}

    def node_of(self, name, index):
        """Return the node of a pod of a run that trains."""
        label = "batch.kubernetes.io/job-completion-index"
        return next(
            pod["spec"]["nodeName"]
            for pod in self.pods(name)
            if pod["metadata"]["labels"][label] == str(index) and pod["status"].get("phase") == "Running"
        )


def test_a_run_is_created_shown_and_deleted(kubernetes, corpus):
    run = kubernetes.runs / "first"
    kubernetes.start("first", corpus, nodes=1, port=9401)
    kubernetes.until_step("first", 20)
    kubernetes.until(lambda: kubernetes.status("first").get("lastCheckpoint", 0) >= 10, "a checkpoint told")
    status = kubernetes.status("first")
    assert (status["phase"], status["nodes"], status["wantedNodes"]) == ("Running", 1, "1")
    assert status["step"] >= 10
    assert 0 < status["loss"] < 10
    assert status["tokensPerSecond"] > 0

    kubernetes.change("first", nodes="two")  # what cannot be goes on as it was, and is told
    kubernetes.until(lambda: "MIN:MAX" in kubernetes.status("first").get("message", ""), "a refusal")
    assert kubernetes.status("first")["phase"] == "Running"

    kubernetes.delete("first")
    kubernetes.until(lambda: kubernetes.run("first") is None, "an end")
    assert not kubernetes.pods("first"), "the finalizer waits for the pods"
    assert steps_of(run) == sorted(set(steps_of(run)))
    kubernetes.until(
        lambda: kubernetes.cluster.get("ConfigMap", "first", namespace=NAMESPACE) is None, "garbage"
    )
    told = [reason for reason, _ in kubernetes.events("first")]
    assert told.count("Starting") == 1
    assert {"Running", "Stopping", "Invalid"} <= set(told)


def test_of_two_replicas_one_acts_and_the_other_takes_over(kubernetes):
    kubernetes.until(lambda: len(kubernetes.operators()) == 2, "two replicas")
    leader = kubernetes.until(
        lambda: next(filter(kubernetes.leads, kubernetes.operators()), None), "a leader"
    )
    (waiting,) = set(kubernetes.operators()) - {leader}
    kubernetes.until(
        lambda: "waits to lead" in kubernetes.cluster.log(waiting, namespace=NAMESPACE), "a start"
    )
    assert not kubernetes.leads(waiting)
    kubernetes.cluster.delete("Pod", leader, namespace=NAMESPACE)
    # The one that waited, or the deleted one's successor, if that is up by the time the lease is free.
    kubernetes.until(
        lambda: kubernetes.leader() in {*kubernetes.operators()} - {leader}, "another one leading"
    )


@pytest.mark.timeout(900)
def test_a_run_is_resized_after_a_save_and_deleted_while_its_operators_are_killed(kubernetes, corpus):
    run = kubernetes.runs / "resized"
    kubernetes.start("resized", corpus, nodes=1, port=9402)
    kubernetes.until_trains_on("resized", 1)
    kubernetes.change("resized", nodes=2)
    kubernetes.kill_operators(4, seed=1)
    saved = kubernetes.until_trains_on("resized", 2, since=1)
    assert [nodes for _, nodes in starts_of(run)] == [1, 2]
    kubernetes.until(lambda: kubernetes.status("resized").get("nodes") == 2, "two nodes told")
    assert kubernetes.status("resized")["starts"] == 2
    told = kubernetes.events("resized")
    assert [reason for reason, _ in told].count("Starting") == 2
    assert ("Stopping", "from 1 to 2 nodes: save, and continue with them") in told

    kubernetes.delete("resized")
    kubernetes.kill_operators(3, seed=2)
    kubernetes.until(lambda: kubernetes.run("resized") is None, "the end")
    assert not kubernetes.pods("resized")
    assert kubernetes.cluster.get("JobSet", "resized", api=JOBSET, namespace=NAMESPACE) is None
    assert saved + 1 in steps_of(run)
    assert steps_of(run) == [*range(1, newest_step(run) + 1)], "each step once: all were saved before"
    accounts = audit_of_pods(run)
    assert (accounts["samples"], accounts["faults"]) == (accounts["steps"] * 12, [])
    assert set(accounts["ranks"]) == {1, 2}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets"),
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/any"),
        ("GET", "/api/v1/nodes"),
        ("PATCH", "/api/v1/nodes/n1"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods"),
        ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/any/exec"),
        ("GET", f"/apis/{API}/trainingruns"),
        ("POST", f"/apis/{API}/namespaces/default/trainingruns"),
        ("PATCH", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainingruns.penstock.dev"),
        ("PATCH", f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/penstock-operator"),
        ("DELETE", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/another"),
    ],
)
def test_everything_that_the_operator_does_not_need_is_denied(kubernetes, method, path):
    token = kubernetes.cluster.token_of(NAMESPACE, "penstock-operator")
    body = None if method in ("GET", "DELETE") else {}
    status, answer = kubernetes.cluster.ask(method, path, body, token=token, kind=MERGE)
    assert status == 403
    assert f'User "system:serviceaccount:{NAMESPACE}:penstock-operator" cannot' in answer["message"]


@pytest.mark.parametrize(
    "one", [m for m in manifests() if m["kind"] != "CustomResourceDefinition"], ids=lambda one: one["kind"]
)
def test_the_manifests_fit_the_schemas_of_the_newest_kubernetes(one):
    validate.validate(one, "1.37", strict=True)


def test_a_wrong_field_is_refused_by_the_server(kubernetes):
    run = {"apiVersion": API, "kind": "TrainingRun", "metadata": {"name": "bad", "namespace": NAMESPACE}}
    status, answer = kubernetes.cluster.create(run | {"spec": {"image": "a", "recipe": "", "api": "ray"}})
    assert status == 422
    assert "spec.api" in answer["message"]
