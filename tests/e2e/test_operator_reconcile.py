"""Single reconciliations of runs on a real API server, where no controller changes anything."""

import json
import subprocess
import threading
from pathlib import Path

import pytest
import yaml

from penstock.cli.operator import plan_of
from penstock.launch.controller.operator_loop import FINALIZER, reconcile_all, reconcile_run
from penstock.launch.controller.reconcile import API, Reconciler
from penstock.launch.engines.kubernetes import ENGINE
from penstock.launch.engines.kubernetes_api import connect
from tests.kubernetes import JOBSET, cluster
from tests.launched import write_recipe
from tests.warm import Command

DEFINITION = Path(__file__).parents[2] / "deploy" / "operator" / "crd.yaml"
TRAINER = "trainer.kubeflow.org/v1alpha1"
NETWORKING = "networking.k8s.io/v1"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """An API server that knows JobSets, and no TrainJobs yet."""
    folder = tmp_path_factory.mktemp("server")
    with cluster(folder, definitions=["jobset"]) as found:
        found.define(yaml.safe_load(DEFINITION.read_text()))
        found.volume("runs", folder / "runs")
        yield found


@pytest.fixture
def operator(server, tmp_path, monkeypatch):
    """Reconcile runs."""
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    connection = connect("default")
    with connection.http:
        yield Reconciler(connection, plan_of)


@pytest.fixture
def start(server, tmp_path):
    """Create a TrainingRun; returns its uid."""

    def start(name, **spec):
        recipe = write_recipe(tmp_path / "recipe.toml", "corpus", run=name, steps=9).read_text()
        wanted = {"image": "test", "recipe": recipe, "volumes": [{"claim": "runs", "path": "/runs"}]}
        meta = {"name": name, "namespace": "default"}
        status, answer = server.create(
            {"apiVersion": API, "kind": "TrainingRun", "metadata": meta, "spec": wanted | spec}
        )
        assert status == 201, answer
        return answer["metadata"]["uid"]

    return start


def status_of(server, name):
    return server.get("TrainingRun", name, api=API)["status"]


def jobset(name, **meta):
    template = {"spec": {"containers": [{"name": "a", "image": "a"}], "restartPolicy": "Never"}}
    job = {"name": "node", "template": {"spec": {"template": template}}}
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": "default", **meta},
        "spec": {"replicatedJobs": [job]},
    }


def test_a_jobset_of_another_is_neither_stopped_nor_deleted_with_the_run(server, operator, start):
    assert server.create(jobset("theirs"))[0] == 201
    start("theirs")
    assert operator.reconcile("theirs")
    assert status_of(server, "theirs")["phase"] == "Invalid"
    assert "JobSet theirs exists and is not this run's" in status_of(server, "theirs")["message"]
    assert operator.reconcile("theirs")
    assert server.patch("TrainingRun", "theirs", {"metadata": {"finalizers": ["a/b"]}}, api=API)[0] == 200
    server.delete("TrainingRun", "theirs", api=API)
    assert not operator.reconcile("theirs"), "nothing of this run is left"
    assert "deletionTimestamp" not in server.get("JobSet", "theirs", api=JOBSET)["metadata"]


def test_a_config_map_of_another_is_neither_changed_nor_owned(server, operator, start):
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "b"}}
    assert server.create(config)[0] == 201
    start("settings")
    assert operator.reconcile("settings")
    assert "ConfigMap settings exists and is not this run's" in status_of(server, "settings")["message"]
    found = server.get("ConfigMap", "settings")
    assert (found["data"], found["metadata"].get("ownerReferences")) == ({"a": "b"}, None)
    assert server.get("JobSet", "settings", api=JOBSET) is None
    server.delete("ConfigMap", "settings")
    assert operator.reconcile("settings")
    assert server.get("JobSet", "settings", api=JOBSET) is not None


def test_the_key_of_another_is_refused_and_the_run_s_own_is_kept(server, operator, start, monkeypatch):
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keyed-rendezvous"}}
    assert server.create(theirs | {"stringData": {"key": "theirs"}})[0] == 201
    start("keyed", nodes=2)
    for _ in range(2):
        assert operator.reconcile("keyed")
        assert "Secret keyed-rendezvous exists and is not this run's" in status_of(server, "keyed")["message"]
        assert server.get("JobSet", "keyed", api=JOBSET) is None
    server.delete("Secret", "keyed-rendezvous")
    with monkeypatch.context() as dying:
        dying.setattr(type(operator.cluster), "apply", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            operator.reconcile("keyed")  # dies between the key and the job
    key = server.get("Secret", "keyed-rendezvous")
    assert operator.reconcile("keyed")
    assert server.get("JobSet", "keyed", api=JOBSET) is not None
    assert server.get("Secret", "keyed-rendezvous")["data"] == key["data"]


def test_a_release_that_renders_otherwise_restarts_nothing(server, operator, start, monkeypatch):
    start("kept")
    assert operator.reconcile("kept")
    before = server.get("JobSet", "kept", api=JOBSET)["metadata"]["uid"]
    monkeypatch.setattr("penstock.launch.render.pod_template.CACHE", "/elsewhere")
    assert operator.reconcile("kept")
    assert server.get("JobSet", "kept", api=JOBSET)["metadata"]["uid"] == before
    run = {"spec": {"nodes": 2}}
    assert server.patch("TrainingRun", "kept", run, api=API)[0] == 200
    assert operator.reconcile("kept")
    assert server.get("JobSet", "kept", api=JOBSET) is None, "a change of the run stops it"


def test_a_network_policy_is_deleted_with_the_wish_for_it(server, operator, start):
    start("open")
    assert operator.reconcile("open")
    assert server.get("NetworkPolicy", "open", api=NETWORKING) is not None
    assert server.patch("TrainingRun", "open", {"spec": {"networkPolicy": "none"}}, api=API)[0] == 200
    for _ in range(2):  # the job is stopped, and made again
        assert operator.reconcile("open")
    assert server.get("JobSet", "open", api=JOBSET) is not None
    assert server.get("NetworkPolicy", "open", api=NETWORKING) is None


def test_a_trainjob_and_the_jobset_that_trainer_makes_of_it_are_one_job(server, operator, start):
    server.install("trainer.kubeflow.org_train")
    start("trained", api="trainjob")
    assert operator.reconcile("trained")
    trainjob = server.get("TrainJob", "trained", api=TRAINER)
    of = {"kind": "TrainJob", "name": "trained", "uid": trainjob["metadata"]["uid"]}
    owner = {"apiVersion": TRAINER, **of, "controller": True}
    assert server.create(jobset("trained", ownerReferences=[owner]))[0] == 201
    assert operator.reconcile("trained")
    assert server.get("TrainJob", "trained", api=TRAINER)["metadata"]["uid"] == of["uid"]
    assert server.get("JobSet", "trained", api=JOBSET) is not None

    assert server.patch("TrainingRun", "trained", {"spec": {"api": "jobset"}}, api=API)[0] == 200
    assert operator.reconcile("trained")
    assert server.get("TrainJob", "trained", api=TRAINER) is None, "the TrainJob is stopped, not its child"
    assert operator.reconcile("trained")
    assert status_of(server, "trained")["phase"] == "Stopping", "until the garbage collector has its JobSet"
    server.delete("JobSet", "trained", api=JOBSET)
    assert operator.reconcile("trained")
    owners = server.get("JobSet", "trained", api=JOBSET)["metadata"]["ownerReferences"]
    assert [one["kind"] for one in owners] == ["TrainingRun"]


@pytest.mark.parametrize("kib", [1, 300, 700])
def test_a_run_of_any_size_is_held_until_nothing_of_it_is_left_and_then_is_gone(server, operator, start, kib):
    name = f"large-{kib}"
    start(name)
    run = server.get("TrainingRun", name, api=API)
    recipe = run["spec"]["recipe"] + f"# {'x' * kib * 1024}\n"
    status, _ = server.patch("TrainingRun", name, {"spec": {"recipe": recipe}}, api=API)
    assert status == 200
    for _ in range(3):
        reconcile_all(operator.cluster, plan_of, threading.Event())
    assert server.get("TrainingRun", name, api=API)["metadata"]["finalizers"] == [FINALIZER]
    assert server.get("JobSet", name, api=JOBSET)["metadata"]["annotations"]
    server.delete("TrainingRun", name, api=API)
    assert "deletionTimestamp" in server.get("TrainingRun", name, api=API)["metadata"], "its job is there"
    reconcile_all(operator.cluster, plan_of, threading.Event())  # deletes the job
    reconcile_all(operator.cluster, plan_of, threading.Event())  # sees that nothing is left
    assert server.get("JobSet", name, api=JOBSET) is None
    assert server.get("TrainingRun", name, api=API) is None


def test_a_run_whose_reconciliation_fails_holds_up_no_other(server, operator, start, caplog):
    start("aaa")
    start("zzz")
    seen = Reconciler.reconcile
    with pytest.MonkeyPatch.context() as patch:

        def reconcile(self, name):
            if name == "aaa":
                raise SystemError("of a library")
            return seen(self, name)

        patch.setattr(Reconciler, "reconcile", reconcile)
        reconcile_all(operator.cluster, plan_of, threading.Event())
    assert "Run aaa" in caplog.text
    assert server.get("JobSet", "zzz", api=JOBSET)
    for name in ("aaa", "zzz"):
        server.delete("TrainingRun", name, api=API)
    for _ in range(3):
        reconcile_all(operator.cluster, plan_of, threading.Event())
    assert server.get("TrainingRun", "aaa", api=API) is None


def test_a_change_of_the_run_since_it_was_listed_is_not_written_over(server, operator, start):
    start("busy")
    listed = next(
        run for run in operator.cluster.all(API, "TrainingRun") if run["metadata"]["name"] == "busy"
    )
    server.patch("TrainingRun", "busy", {"metadata": {"finalizers": ["example.com/other"]}}, api=API)
    reconcile_run(operator.cluster, plan_of, listed)
    assert server.get("TrainingRun", "busy", api=API)["metadata"]["finalizers"] == ["example.com/other"]
    reconcile_all(operator.cluster, plan_of, threading.Event())
    held = server.get("TrainingRun", "busy", api=API)["metadata"]["finalizers"]
    assert held == ["example.com/other", FINALIZER]


def test_a_signal_that_comes_before_the_first_reconciliation_ends_the_operator(server, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    with Command("operator", "--namespace", "default", stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "leads in" in line:
                process.terminate()
                break
        rest = process.stderr.read()
        assert process.wait() == 0, rest
    lease = server.get("Lease", "penstock-operator", api="coordination.k8s.io/v1")
    assert lease["spec"].get("holderIdentity", "") == "", "another replica leads at once"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "nvidia.com/gpu;x"),
        ("fsGroup", -1),
        ("grace", 10**15),
        ("requiredTopology", "a;b"),
        ("memory", "much"),
        ("volumes", [{"claim": "runs", "path": "/a/../b"}]),
    ],
)
def test_the_api_server_refuses_a_field_beyond_its_limit_by_name(server, field, value):
    wanted = {"image": "test", "recipe": "", field: value}
    meta = {"name": "beyond", "namespace": "default"}
    run = {"apiVersion": API, "kind": "TrainingRun", "metadata": meta, "spec": wanted}
    status, answer = server.create(run)
    assert (status, f"spec.{field}" in answer["message"]) == (422, True), answer


def test_fields_reach_the_pods_as_they_are_given(server, operator, start):
    start("zero", fsGroup=0, env={"A": "$(HOME) $$"}, oversubscribe=True)
    operator.reconcile("zero")
    (job,) = server.get("JobSet", "zero", api=JOBSET)["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["fsGroup"] == 0
    found = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert found["A"] == "$$(HOME) $$$$"
    spec = json.loads(server.get("ConfigMap", "zero")["data"]["spec.json"])
    assert spec["command"][-1] == "--oversubscribe"


def test_a_patch_reaches_the_pods_and_one_that_asks_for_more_starts_nothing(server, operator, start):
    gpu = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    patch = {"metadata": {"labels": {"team": "a"}}, "spec": {"tolerations": [gpu]}}
    start("patched", podPatch=patch)
    operator.reconcile("patched")
    (job,) = server.get("JobSet", "patched", api=JOBSET)["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]["template"]
    assert (pods["metadata"]["labels"]["team"], pods["spec"]["tolerations"]) == ("a", [gpu])
    start("attack", podPatch={"spec": {"tolerations": [gpu], "hostNetwork": True}})
    operator.reconcile("attack")
    found = status_of(server, "attack")
    assert (found["phase"], "spec.hostNetwork is refused" in found["message"]) == ("Invalid", True), found
    assert server.get("JobSet", "attack", api=JOBSET) is None
    listed = ENGINE.jobs("/default")
    assert (listed["patched"].state.status, "attack" in listed) == ("PENDING", False)
