"""What a run on Kubernetes leaves and takes over when it is submitted again or resized: a real API server.

No controller runs, so nothing is collected, and no pod starts: what is deleted or owned is our own doing.
"""

import gc
from dataclasses import replace

import pytest
from tests.e2e.test_node_checks import manifests
from tests.kubernetes import JOBSET, cluster
from tests.unit.launch.render.test_kubernetes import SPECS, make_pod_spec
from tests.unit.launch.render.test_serving import SPECS as SERVING

from penstock.core.errors import PenstockError, UsageError
from penstock.launch.engines import kubernetes
from penstock.launch.engines.kubernetes_api import connect
from penstock.launch.job_folder import JobFolder
from penstock.launch.pods.code import code_config_map, code_of
from penstock.launch.render.kubernetes import render_kubernetes
from penstock.launch.render.serving import render_serving
from penstock.launch.spec import node_range

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # of clients, which nobody closes


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kubernetes")
    with cluster(folder, definitions=["jobset", "trainer", "k8s.cni", "multinic"]) as found:
        found.volume("runs", folder / "runs")
        yield found


@pytest.fixture
def connection(found, tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(found.kubeconfig(tmp_path / "kubeconfig")))
    yield connect("default")
    gc.collect()


NOT_ASKED = {"ResourceClaimTemplate", "HorizontalPodAutoscaler", "InferenceService"}
"""Kinds, or versions of them, that this server is too old for, or that nobody installed: schemas alone."""


@pytest.mark.parametrize(
    "objects",
    [
        *(pytest.param(render_kubernetes(spec).objects, id=name) for name, spec in SPECS.items()),
        *(
            pytest.param(render_serving(spec).objects, id=name)
            for name, spec in SERVING.items()
            if name != "kserve"
        ),
    ],
)
def test_the_server_would_take_every_object_that_is_rendered(connection, objects):
    asked = [found for found in objects if found["kind"] not in NOT_ASKED]
    for found in asked:
        tried = connection.apply(found, is_tried=True)
        assert tried["metadata"]["name"] == found["metadata"]["name"]
    assert len(asked) >= len(objects) - 1


def test_the_server_takes_every_object_of_the_node_checks(found):
    """Server 1.20 has CronJobs as v1beta1, and drops the fields of an indexed job."""
    for one in manifests():
        old = {"apiVersion": "batch/v1beta1"} if one["kind"] == "CronJob" else {}
        status, answer = found.create({**one, **old})
        assert status == 201, answer


def submit(connection, folder, spec, *, more=()):
    kubernetes.submit(spec, folder, render_kubernetes(spec), connection, more=more)


def owners_of(found, name):
    return [owner["uid"] for owner in found.get("ConfigMap", name)["metadata"]["ownerReferences"]]


def uid_of(found, kind, name, **api):
    return found.get(kind, name, **api)["metadata"]["uid"]


def test_an_ended_run_that_is_submitted_again_takes_over_no_object_of_the_job_before(
    found, connection, tmp_path
):
    folder, spec = JobFolder(tmp_path / "again"), make_pod_spec(name="again")
    submit(connection, folder, spec)
    first, config = uid_of(found, "JobSet", "again", api=JOBSET), uid_of(found, "ConfigMap", "again")
    ended = {"type": "Completed", "status": "True", "reason": "a", "message": "a"}
    ended["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    connection.set_status(JOBSET, "JobSet", "again", {"conditions": [ended]})

    submit(connection, folder, spec)
    second = uid_of(found, "JobSet", "again", api=JOBSET)
    assert second != first
    assert uid_of(found, "ConfigMap", "again") != config, "its owner is gone: it would be collected"
    assert owners_of(found, "again") == [second]


def test_a_resized_run_keeps_its_code(found, connection, tmp_path):
    archive = b"not even an archive"
    code = code_of(archive, store="")
    shared = code_config_map(archive, code, "default")
    folder = JobFolder(tmp_path / "coded")
    submit(connection, folder, make_pod_spec(name="coded", pod={"code": code}), more=[shared])
    name = shared["metadata"]["name"]
    before = found.get("ConfigMap", name)["binaryData"]

    kubernetes.ENGINE.resize(folder.job(), folder, node_range("3"))
    job = found.get("JobSet", "coded", api=JOBSET)
    assert job["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 3
    assert job["metadata"]["uid"] in owners_of(found, name), "else it is collected with the job before"
    assert found.get("ConfigMap", name)["binaryData"] == before


def test_an_object_that_is_collected_while_a_run_takes_it_over_is_gone_and_no_error(
    found, connection, tmp_path
):
    folder = JobFolder(tmp_path / "gone")
    spec = make_pod_spec(name="gone")
    submit(connection, folder, spec)
    config, job = render_kubernetes(spec).objects[0], found.get("JobSet", "gone", api=JOBSET)
    assert connection.own(config, job) is True
    found.delete("ConfigMap", "gone")
    assert connection.own(config, job) is False


@pytest.mark.parametrize("owner", ["", "TrainingRun"])
def test_a_config_map_of_another_is_not_taken_over(found, connection, tmp_path, owner):
    name = f"theirs{owner.lower()}"
    meta = {"name": name, "labels": {"app.kubernetes.io/managed-by": "penstock"} if owner else {}}
    if owner:
        meta["ownerReferences"] = [{"apiVersion": "penstock.dev/v1", "kind": owner, "name": name, "uid": "7"}]
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"a": "b"}}
    assert found.create(config)[0] == 201
    with pytest.raises(UsageError, match=f"ConfigMap {name} exists in namespace default"):
        submit(connection, JobFolder(tmp_path / name), make_pod_spec(name=name))
    assert found.get("ConfigMap", name)["data"] == {"a": "b"}
    assert found.get("JobSet", name, api=JOBSET) is None


def test_a_live_job_of_the_other_kind_keeps_its_name_and_its_recipe(found, connection, tmp_path):
    spec = make_pod_spec(name="both")
    submit(connection, JobFolder(tmp_path / "first"), spec)
    before = found.get("ConfigMap", "both")
    other = replace(spec, pod=replace(spec.pod, api="trainjob", recipe="[run]\nsteps = 1\n"))
    with pytest.raises(PenstockError, match="JobSet both exists in namespace default, and has not ended"):
        submit(connection, JobFolder(tmp_path / "second"), other)
    assert found.get("ConfigMap", "both") == before
