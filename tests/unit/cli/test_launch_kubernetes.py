"""`penstock launch kubernetes` with a cluster that is a dictionary: what is refused before a submit."""

import pytest
from tests.launched import write_recipe
from tests.unit.launch.engines.test_kubernetes import FakeCluster

from penstock.cli.main import main
from penstock.launch.engines import kubernetes_api


@pytest.fixture
def cluster(monkeypatch):
    found = FakeCluster()
    disk = {"metadata": {"name": "disk"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    found.objects["PersistentVolumeClaim", "disk"] = disk
    monkeypatch.setattr(kubernetes_api, "connect", lambda *_, **__: found)
    return found


@pytest.fixture
def launch(tmp_path, capfd):
    """Type `penstock launch kubernetes` for a recipe; returns the exit code, and what is printed."""
    recipe = write_recipe(tmp_path / "recipe.toml", "corpus", run="run", steps=3)

    def launch(*words):
        code = main(["launch", "kubernetes", str(recipe), "--image", "penstock", *words])
        return code, " ".join("".join(capfd.readouterr()).split())

    return launch


@pytest.mark.parametrize("setting", ["run.dir=../out", "data.corpora.python.path=/runs/../corpus"])
def test_a_path_that_leaves_its_volume_is_refused(launch, setting):
    code, said = launch("--volume=runs:/runs", f"--set={setting}", "--dry-run")
    assert (code, "is in no volume of the pods (/runs), and is lost with a pod" in said) == (2, True), said


def test_a_dry_run_lets_the_cluster_try_the_objects_and_leaves_none(cluster, launch):
    code, said = launch("--volume", "runs:/runs", "--dry-run")
    assert (code, "https://fake would take 3 objects" in said) == (0, True), said
    assert cluster.kinds() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--volume=rums:/runs"], "no PersistentVolumeClaim rums"),
        (["--volume=disk:/runs", "--nodes=2"], "Claim disk is ReadWriteOnce"),
        (["--volume=runs:/runs", "--queue=research"], "(got '--queue research'). Known: none."),
        (["--volume=runs:/runs", "--secret=KEY=key:wandb/key"], "no Secret wandb"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_a_dry_run_refuses_what_a_submit_refuses(launch, words, message):
    code, said = launch(*words, "--dry-run")
    assert (code, message in said) == (2, True), said
