"""What a submit leaves in a cluster and in the run's folder; logs of pods, also of those that start later."""

from threading import Event

import pytest

from penstock.core.errors import PenstockError
from penstock.launch.engines import kubernetes
from penstock.launch.engines.kubernetes import PodsStarted, followed
from penstock.launch.job_folder import JobFolder
from penstock.launch.pod_node import PROGRESS
from penstock.launch.render.kubernetes import render_kubernetes
from penstock.launch.spec import node_range
from tests.unit.launch.render.test_kubernetes import make_pod_spec

PATIENCE_S = 60.0
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

    def own(self, _found, _owner):
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
    assert cluster.kinds() == ["ConfigMap", "NetworkPolicy", "JobSet"]
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


@pytest.mark.parametrize("text", ["not: [yaml", "[1]", "{}", "", "clusters: 3"])
def test_a_kubeconfig_that_is_none_is_one_paragraph_with_a_remedy(tmp_path, monkeypatch, text):
    pytest.importorskip("lightkube")
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(PenstockError, match=r"No cluster is configured: .*KUBECONFIG") as error:
        kubernetes.connect("default")
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
    assert cluster.kinds() == ["ConfigMap", "NetworkPolicy", "JobSet"], "and nothing of the trial"
    assert "status" not in cluster.objects["JobSet", "first"]


def test_a_size_that_the_server_refuses_stops_no_run(tmp_path, monkeypatch):
    cluster, folder = FakeCluster(), JobFolder(tmp_path / "run")
    submit(cluster, folder, make_pod_spec())
    monkeypatch.setattr(kubernetes, "_cluster_of", lambda _job: cluster)
    cluster.most_nodes = 4
    before = dict(cluster.objects)
    with pytest.raises(PenstockError, match="too many nodes"):
        kubernetes.ENGINE.resize(folder.job(), folder, node_range("5"))
    assert cluster.objects == before
    kubernetes.ENGINE.resize(folder.job(), folder, node_range("4"))
    assert cluster.objects["JobSet", "first"] != before["JobSet", "first"]


class Pods:
    """Pods of a job: what each prints, each time that it is read, and which have started at each look."""

    def __init__(self, *looks, **printed):
        self.looks, self.printed = list(looks), {name: list(reads) for name, reads in printed.items()}

    def look(self):
        is_over = len(self.looks) == 1
        names = self.looks[0] if is_over else self.looks.pop(0)
        return PodsStarted(names={f"uid-{name}": name for name in names}, is_over=is_over)

    def read(self, name):
        yield from self.printed[name].pop(0)

    def lines(self):
        return followed(self.look, self.read, pause_s=0.01)


def test_pods_that_start_later_are_followed_until_the_job_is_over():
    pods = Pods([], ["a"], ["a", "b"], ["a", "b", "c"], a=[["a1", "a2"]], b=[["b1"]], c=[["c1"]])
    assert sorted(pods.lines()) == ["a1", "a2", "b1", "c1"], "each once"


def test_a_pod_whose_container_had_not_started_is_read_again():
    pods = Pods(*[["a"]] * 100, a=[[]] * 3 + [["a1"]] + [[]] * 100)
    assert next(pods.lines()) == "a1"


def test_a_pod_that_prints_nothing_holds_up_no_other():
    ends = Event()

    def silent():
        ends.wait(PATIENCE_S)
        yield "late"

    lines = Pods(["quiet", "loud"], ["quiet", "loud"], quiet=[silent()], loud=[["a", "b"]]).lines()
    assert [next(lines), next(lines)] == ["a", "b"]
    ends.set()
    assert list(lines) == ["late"]


def test_a_log_that_stays_open_after_the_end_of_its_job_is_left(monkeypatch):
    monkeypatch.setattr(kubernetes, "_LAST_LINES_S", 0.1)
    ends = Event()

    def open_for_ever():
        yield "a"
        ends.wait(PATIENCE_S)

    assert list(Pods(["lost"], lost=[open_for_ever()]).lines()) == ["a"]
    ends.set()


def test_a_log_that_breaks_off_is_told():
    def broken():
        yield "a"
        raise PenstockError("the cluster is gone")

    lines = Pods(["a"], a=[broken()]).lines()
    assert next(lines) == "a"
    with pytest.raises(PenstockError, match="the cluster is gone"):
        next(lines)


def test_lines_of_the_first_pod_that_are_cut_or_of_another_kind_tell_nothing():
    lines = ['[progress] {"step": 1}\n', '[progress] {"st', "[progress] 3\n", '[rank 0] {"step": 2}\n', "\n"]
    assert kubernetes._printed(lines, PROGRESS) == [{"step": 1}]
