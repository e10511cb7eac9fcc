"""What a submit leaves in a cluster and in the run's folder."""

import pytest

from penstock.core.errors import PenstockError
from penstock.launch.engines import kubernetes
from penstock.launch.engines.kubernetes_api import connect
from penstock.launch.job_folder import JobFolder
from penstock.launch.render.kubernetes import render_kubernetes
from penstock.launch.spec import node_range
from tests.unit.launch.render.test_kubernetes import make_pod_spec

RECORD = ("spec.json", "recipe.toml", "job.json")


class FakeCluster:
    """A namespace that keeps the objects that it is given, and refuses what a server refuses of a JobSet.

    There is a claim `runs`, and no other.
    """

    server, context, namespace = "https://fake", "fake", "default"

    def __init__(self):
        claim = {"metadata": {"name": "runs"}, "spec": {"accessModes": ["ReadWriteMany"]}}
        self.objects = {("PersistentVolumeClaim", "runs"): claim}
        self.most_nodes = 9

    def get(self, _api, kind, name):
        return self.objects.get((kind, name))

    def all(self, _api, kind, _labels=None):
        return [found for (of, _), found in self.objects.items() if of == kind]

    def apply(self, found, *, is_tried=False):
        name = found["metadata"]["name"]
        if found["kind"] == "JobSet":
            self._check_job(found)
        found = {**found, "metadata": {**found["metadata"], "uid": f"{found['kind']}-{name}"}}
        if not is_tried:
            self.objects[found["kind"], name] = found
        return found

    def _check_job(self, found):
        before = self.objects.get(("JobSet", found["metadata"]["name"]), found)
        if before["spec"] != found["spec"]:
            raise PenstockError("spec: field is immutable")
        if found["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] > self.most_nodes:
            raise PenstockError("spec: too many nodes")

    def end(self, name):
        """End a job."""
        completed = [{"type": "Completed", "status": "True"}]
        self.objects["JobSet", name]["status"] = {"conditions": completed}

    def create(self, found):
        self.objects[found["kind"], found["metadata"]["name"]] = found
        return True

    def own(self, _found, _owner, **_is_new):
        return True

    def delete(self, _api, kind, name, **_grace):
        self.objects.pop((kind, name), None)

    def kinds(self):
        return [kind for kind, _ in self.objects if kind != "PersistentVolumeClaim"]


def submit(cluster, folder, spec):
    return kubernetes.submit(spec, folder, render_kubernetes(spec), cluster)


def test_a_submitted_run_is_recorded_with_all_that_its_next_size_needs(tmp_path):
    cluster, folder, spec = FakeCluster(), JobFolder(tmp_path / "run"), make_pod_spec()
    assert submit(cluster, folder, spec) == "first"
    assert cluster.kinds() == ["Secret", "ConfigMap", "NetworkPolicy", "JobSet"]
    assert (folder.job().ident, folder.spec()) == ("first", spec)
    assert (folder.path / "recipe.toml").read_text() == spec.pod.recipe


@pytest.mark.parametrize("file", ["run", *(f"run/launch/{name}" for name in RECORD)])
def test_a_run_that_cannot_be_recorded_is_not_submitted(tmp_path, file):
    cluster, folder = FakeCluster(), JobFolder(tmp_path / "run")
    if file == "run":
        (tmp_path / file).write_text("a file")
    else:
        (tmp_path / file / "a folder").mkdir(parents=True)
    with pytest.raises((NotADirectoryError, IsADirectoryError)):
        submit(cluster, folder, make_pod_spec())
    assert cluster.kinds() == []


class SilentCluster(FakeCluster):
    """A cluster that makes a job and is away before it answers; the first deletion finds it away still."""

    def __init__(self):
        super().__init__()
        self.is_away = False

    def apply(self, found, *, is_tried=False):
        applied = super().apply(found, is_tried=is_tried)
        if found["kind"] == "JobSet" and not is_tried:
            self.is_away = True
            raise PenstockError("no answer")
        return applied

    def delete(self, api, kind, name, **grace):
        if self.is_away and kind != "JobSet":
            self.is_away = False
            raise PenstockError("away")
        super().delete(api, kind, name, **grace)


def test_a_job_whose_answer_is_lost_is_deleted_and_what_may_be_left_is_named(tmp_path, caplog):
    cluster, folder = SilentCluster(), JobFolder(tmp_path / "run")
    with pytest.raises(PenstockError, match="no answer"):
        submit(cluster, folder, make_pod_spec())
    assert cluster.kinds() == ["NetworkPolicy"]
    assert "NetworkPolicy first of the run may be left: away" in caplog.text
    assert not folder.has_job()


@pytest.mark.parametrize("text", ["not: [yaml", "[1]", "{}", "", "clusters: 3"])
def test_a_kubeconfig_that_is_none_is_one_paragraph_with_a_remedy(tmp_path, monkeypatch, text):
    pytest.importorskip("lightkube")
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(PenstockError, match=r"No cluster is configured: .*KUBECONFIG") as error:
        connect("default")
    assert "\n" not in str(error.value)


def test_an_ended_run_makes_room_only_for_a_job_that_the_server_would_take(tmp_path):
    cluster, folder = FakeCluster(), JobFolder(tmp_path / "run")
    submit(cluster, folder, make_pod_spec())
    cluster.end("first")
    cluster.most_nodes = 4
    before = dict(cluster.objects)
    with pytest.raises(PenstockError, match="too many nodes"):
        submit(cluster, folder, make_pod_spec(nodes=node_range("5")))
    assert cluster.objects == before
    submit(cluster, folder, make_pod_spec(nodes=node_range("4")))
    assert sorted(cluster.kinds()) == ["ConfigMap", "JobSet", "NetworkPolicy", "Secret"], "and not the trial"
    assert "status" not in cluster.objects["JobSet", "first"]


def test_a_size_that_the_server_refuses_stops_no_run(tmp_path, monkeypatch):
    cluster, folder = FakeCluster(), JobFolder(tmp_path / "run")
    submit(cluster, folder, make_pod_spec())
    monkeypatch.setattr(kubernetes, "cluster_of", lambda _job: cluster)
    cluster.most_nodes = 4
    before = dict(cluster.objects)
    with pytest.raises(PenstockError, match="too many nodes"):
        kubernetes.ENGINE.resize(folder.job(), folder, node_range("5"))
    assert cluster.objects == before
    kubernetes.ENGINE.resize(folder.job(), folder, node_range("4"))
    assert cluster.objects["JobSet", "first"] != before["JobSet", "first"]
