"""The node checks as a cluster runs them: the manifests, and what their page says.

A real server is asked in integration/test_kubernetes_objects.py.
"""

import json
import re
from pathlib import Path

import kubernetes_validate as validate
import pytest
import yaml

from penstock.cli.main import main
from tests.warm import penstock

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "node-checks"
PAGE = ROOT / "docs" / "how-to" / "check-nodes.md"


def manifests():
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {*names, "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    return [found for name in names for found in yaml.safe_load_all((FOLDER / name).read_text())]


def job():
    (found,) = [one for one in manifests() if one["kind"] == "CronJob"]
    return found["spec"]["jobTemplate"]["spec"]


def test_the_manifests_fit_the_schemas_of_the_newest_kubernetes():
    for one in manifests():
        validate.validate(one, "1.37", strict=True)


def test_a_misspelt_field_would_be_found():
    (found,) = [one for one in manifests() if one["kind"] == "CronJob"]
    found["spec"]["jobTemplate"]["spec"]["template"]["spec"]["priorityClass"] = "low"
    with pytest.raises(validate.ValidationError):
        validate.validate(found, "1.37", strict=True)


def test_the_checks_ask_for_no_privilege_and_no_right():
    pod = job()["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(set(volume) == {"name", "emptyDir"} for volume in pod["volumes"])
    assert {one["kind"] for one in manifests()} == {"Namespace", "PriorityClass", "CronJob"}


def test_each_node_gets_one_pod():
    labels = job()["template"]["metadata"]["labels"]
    affinity = job()["template"]["spec"]["affinity"]["podAntiAffinity"]
    (rule,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule == {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": labels},
    }
    assert job()["completions"] == job()["parallelism"]


def test_the_container_prints_its_findings_as_json():
    (container,) = job()["template"]["spec"]["containers"]
    done = penstock(*container["args"])
    assert {finding["check"] for finding in json.loads(done.stdout)["findings"]} == {"gpus", "copies"}


def test_the_rule_for_node_problem_detector_tells_cards_from_programs():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    config = json.loads(text)
    (rule,) = config["rules"]
    assert rule["condition"] == config["conditions"][0]["type"]
    lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    program = "NVRM: Xid (PCI:0000:3b:00): 31, pid=4711, name=python, Ch 00000008, intr 00000000. MMU Fault"
    assert re.fullmatch(rule["pattern"], lost)
    assert not re.fullmatch(rule["pattern"], program)


def test_an_unknown_check_is_named(capsys):
    assert main(["doctor", "--checks", "gpu"]) == 2
    assert "Did you mean 'gpus'?" in capsys.readouterr().err
