"""The doctor in the pods of a run, before its first start."""

import json
import subprocess
import sys

import pytest
from tests.ports import free_port
from tests.unit.launch.test_spec import make_spec

from penstock.launch.job_folder import JobFolder
from penstock.launch.pod_networks import PodNetwork
from penstock.launch.pods.pod import PodSpec
from penstock.launch.pods.preflight import is_examined
from penstock.launch.preflight import EXCLUDE, REPORT, REPORT_JSON, command_of
from penstock.launch.spec import RunSpec, node_range

POD = """
import json, sys
from pathlib import Path
from penstock.core.errors import PenstockError
from penstock.launch.job_folder import JobFolder
from penstock.launch.pods.preflight import examine_pods
from penstock.launch.spec import RunSpec

spec, node, port = RunSpec.read(json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
folder = JobFolder(Path(spec.run_dir))
folder.make()
try:
    examine_pods(spec, folder, node=node, host="127.0.0.1", port=port, job="j1")
except PenstockError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def spec_of(folder, **keys):
    networks = keys.pop("networks", ())
    pod = PodSpec(image="registry/penstock:0.1", networks=networks)
    return make_spec(run_dir=str(folder), pod=pod, nodes=node_range("2"), doctor="require", **keys)


def pods_of(spec):
    """Run a pod of each node to its end; returns exit codes and outputs."""
    words = [sys.executable, "-c", POD, json.dumps(spec.as_json())]
    port = str(free_port())
    pods = [
        subprocess.Popen([*words, str(node), port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for node in range(2)
    ]
    said = [pod.communicate(timeout=120) for pod in pods]
    return [(pod.returncode, *each) for pod, each in zip(pods, said, strict=True)]


def test_a_missing_card_keeps_a_run_that_asks_for_sound_nodes_from_starting(tmp_path):
    spec = spec_of(tmp_path, networks=(PodNetwork(master="ens1", subnet="10.1.0.0/24"),))
    (code, _, errors), _ = pods_of(spec)
    folder = JobFolder(tmp_path)
    assert code == 2, errors
    assert "the run asks for sound nodes (--doctor require)" in errors
    assert "lacks networks of the run: net1" in " ".join(errors.split())
    assert folder.examined_job() == "j1"
    (event,) = folder.events()
    assert (event["event"], event["code"]) == ("examined", 1)
    assert not (folder.path / "examined-j1").exists()


def test_pods_examine_each_other_once_for_a_job(tmp_path):
    spec = spec_of(tmp_path)
    (code, out, errors), (other, _, _) = pods_of(spec)
    folder = JobFolder(tmp_path)
    assert (code in (0, 2), other) == (True, 0), errors  # this machine may be short of something
    assert "2 nodes: " in out
    assert out == (folder.path / REPORT).read_text()
    assert len(json.loads((folder.path / REPORT_JSON).read_text())["links"]) >= 2
    assert (folder.path / EXCLUDE).exists()
    assert is_examined(spec, folder, job="j1")
    assert not is_examined(spec, folder, job="j2")


@pytest.mark.parametrize("keys", [{"doctor": "skip"}, {"nodes": node_range("1:2")}])
def test_runs_that_ask_for_none_and_runs_whose_nodes_come_and_go_have_no_preflight(keys, tmp_path):
    spec: RunSpec = make_spec(**{"doctor": "report", "nodes": node_range("2"), **keys})
    assert is_examined(spec, JobFolder(tmp_path), job="j1")


def test_the_doctor_measures_the_cards_that_were_declared(tmp_path):
    cards = [PodNetwork(master=f"ens{n}", subnet=f"10.{n}.0.0/24") for n in (1, 2)]
    command = command_of(spec_of(tmp_path, networks=tuple(cards)))
    assert {"--network=net1", "--network=net2"} <= set(command)
