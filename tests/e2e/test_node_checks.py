"""The node checks as a cluster runs them: manifests, rights, the node's condition, and the daemon itself."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import kubernetes_validate as validate
import pytest
import yaml

from penstock.cli.main import main
from penstock.core.env import ClusterApi
from penstock.core.pod_https import Credentials, Refused
from penstock.doctor import daemon
from penstock.doctor.checks.check import green, red
from penstock.doctor.node_condition import TYPE, set_condition
from tests.e2e.test_monitoring import free_port
from tests.in_process import run_cli
from tests.kubernetes import cluster
from tests.warm import Command, penstock

FOLDER = Path(__file__).parents[2] / "deploy" / "node-checks"
NAME = "penstock-node-checks"
MERGE = "application/strategic-merge-patch+json"


def manifests():
    names = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert {*names, "kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    return [found for name in names for found in yaml.safe_load_all((FOLDER / name).read_text())]


def daemon_set():
    (found,) = [one for one in manifests() if one["kind"] == "DaemonSet"]
    return found


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory):
    """A cluster with a node, and with the manifests of the node checks."""
    with cluster(tmp_path_factory.mktemp("kubernetes")) as found:
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}}
        assert found.create(node)[0] == 201
        assert found.create({**node, "metadata": {"name": "n2"}})[0] == 201
        for one in manifests():
            status, answer = found.create(one)
            assert status == 201, answer
        yield found


@pytest.fixture
def pod(kubernetes, tmp_path):
    """What a pod of the daemon has: the address of the API, and its account's token and authority."""
    token = tmp_path / "token"
    token.write_text(kubernetes.token_of(NAME, NAME))
    return (
        ClusterApi(url=kubernetes.url, node="n1"),
        Credentials(ca_file=kubernetes.ca_file, token_file=token),
    )


def condition_at(kubernetes, node="n1"):
    _, answer = kubernetes.ask("GET", f"/api/v1/nodes/{node}")
    found = [one for one in answer["status"].get("conditions", []) if one["type"] == TYPE]
    return found[0] if found else None


def test_the_manifests_fit_the_schemas_of_the_newest_kubernetes():
    for one in manifests():
        validate.validate(one, "1.37", strict=True)


def test_a_misspelt_field_would_be_found():
    found = daemon_set()
    found["spec"]["template"]["spec"]["priorityClass"] = NAME
    with pytest.raises(validate.ValidationError):
        validate.validate(found, "1.37", strict=True)


def test_the_daemon_asks_for_no_privilege():
    pod = daemon_set()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert all(set(volume) == {"name", "emptyDir"} for volume in pod["volumes"])
    rules = [rule for one in manifests() if one["kind"].endswith("Role") for rule in one["rules"]]
    assert rules == [{"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]}]


def test_the_options_of_the_daemon_exist():
    words = daemon_set()["spec"]["template"]["spec"]["containers"][0]["args"]
    assert words[0] == "doctor"
    told = run_cli("doctor", "--help").stdout
    assert all(word.partition("=")[0] in told for word in words[1:])
    checks = next(word for word in words if word.startswith("--checks"))
    done = penstock("doctor", checks, "--json")
    assert {finding["check"] for finding in json.loads(done.stdout)["findings"]} == {"gpus", "copies"}


@pytest.mark.parametrize("one", manifests(), ids=lambda one: one["kind"])
def test_the_server_accepts_each_object_in_a_dry_run(kubernetes, one):
    changed = {**one, "metadata": {**one["metadata"], "name": "another"}}
    status, answer = kubernetes.create(changed, dry_run=True)
    assert status == 201, answer


def test_the_condition_of_the_node_follows_the_findings(kubernetes, pod):
    api, credentials = pod
    good, bad = green("gpus", "8 GPUs"), red("gpus", "The GPU at 3b has 3 errors", remedy="Reset it.")
    set_condition(api, [bad], now="2026-11-23T09:00:00Z", credentials=credentials)  # whatever it was before
    set_condition(api, [good], now="2026-11-23T10:00:00Z", credentials=credentials)
    found = condition_at(kubernetes)
    assert (found["status"], found["reason"]) == ("False", "ChecksPassed")
    set_condition(api, [good], now="2026-11-23T11:00:00Z", credentials=credentials)
    found = condition_at(kubernetes)
    assert found["lastTransitionTime"] == "2026-11-23T10:00:00Z", "nothing has changed"
    assert found["lastHeartbeatTime"] == "2026-11-23T11:00:00Z"
    set_condition(api, [good, bad], now="2026-11-23T12:00:00Z", credentials=credentials)
    found = condition_at(kubernetes)
    assert (found["status"], found["reason"]) == ("True", "ChecksFailed")
    assert found["message"] == "gpus: The GPU at 3b has 3 errors"
    assert found["lastTransitionTime"] == "2026-11-23T12:00:00Z"
    set_condition(api, None, now="2026-11-23T13:00:00Z", credentials=credentials)
    assert condition_at(kubernetes)["status"] == "Unknown"


def test_conditions_of_others_are_left_alone(kubernetes, pod):
    api, credentials = pod
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
    body = {"status": {"conditions": [ready]}}
    assert kubernetes.ask("PATCH", "/api/v1/nodes/n1/status", body, kind=MERGE)[0] == 200
    set_condition(api, [], now="2026-11-23T10:00:00Z", credentials=credentials)
    _, node = kubernetes.ask("GET", "/api/v1/nodes/n1")
    assert {"Ready", TYPE} <= {one["type"] for one in node["status"]["conditions"]}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/api/v1/nodes/n1", None),
        ("GET", "/api/v1/nodes", None),
        ("PATCH", "/api/v1/nodes/n1", {"spec": {"unschedulable": True}}),
        ("DELETE", "/api/v1/nodes/n1", None),
        ("GET", f"/api/v1/namespaces/{NAME}/pods", None),
        ("GET", "/api/v1/secrets", None),
        ("GET", f"/api/v1/namespaces/{NAME}/serviceaccounts", None),
    ],
)
def test_everything_else_is_denied(kubernetes, pod, method, path, body):
    token = pod[1].token_file.read_text()
    status, answer = kubernetes.ask(method, path, body, token=token, kind=MERGE)
    assert status == 403
    assert f'User "system:serviceaccount:{NAME}:{NAME}" cannot' in answer["message"]


def test_a_status_patch_changes_no_spec(kubernetes, pod):
    token = pod[1].token_file.read_text()
    body = {"spec": {"unschedulable": True}, "metadata": {"labels": {"a": "b"}}}
    kubernetes.ask("PATCH", "/api/v1/nodes/n2/status", body, token=token, kind=MERGE)
    _, node = kubernetes.ask("GET", "/api/v1/nodes/n2")
    assert "unschedulable" not in node["spec"]


def test_a_token_that_nobody_gave_is_refused(pod, tmp_path):
    api, credentials = pod
    (tmp_path / "forged").write_text("forged")
    with pytest.raises(Refused, match="401"):
        set_condition(
            api,
            [],
            now="2026-11-23T10:00:00Z",
            credentials=Credentials(ca_file=credentials.ca_file, token_file=tmp_path / "forged"),
        )


def test_the_daemon_sets_the_condition_of_its_node(kubernetes, pod, caplog):
    api, credentials = pod
    told = iter([False, False, False, True])
    daemon.run(
        ["--checks", "gpus", "--expect-gpus", "0"],
        every_s=0.0,
        host="127.0.0.1",
        port=None,
        node="n1",
        api=api,
        credentials=credentials,
        is_stopped=lambda: (
            condition_at(kubernetes) is not None
            and condition_at(kubernetes)["reason"] == "ChecksPassed"
            and next(told, True)
        ),
    )
    assert condition_at(kubernetes)["status"] == "False"
    assert "was not set" not in caplog.text


@pytest.fixture
def watching():
    """`penstock doctor --every`, its port and its process; ended by the test or by force."""
    port = free_port()
    command = ["doctor", "--every", "1h", "--checks", "gpus"]
    words = ["--metrics-port", str(port), "--expect-gpus"]
    running = []

    def start(expected):
        process = Command(*command, *words, expected, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
        running.append(process)
        deadline = time.monotonic() + 120
        while "penstock_node_healthy" not in (text := page(port)):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        return process, text

    yield start
    for process in running:
        process.kill()
        process.wait()
        process.stderr.close()


def page(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode()
    except OSError:
        return ""


def test_the_daemon_serves_its_findings_and_ends_at_a_signal(watching):
    process, text = watching(0)
    (line,) = [line for line in text.splitlines() if line.startswith("penstock_node_healthy{")]
    assert line.endswith(" 1.0")
    assert 'check="gpus",level="green"' in text
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert "Traceback" not in process.stderr.read()


def test_checks_that_cannot_run_are_no_health(caplog):
    result = daemon.run_checks(["--no-such-option"], is_stopped=lambda: False)
    assert result.findings is None
    assert "the checks did not run: exit=2" in caplog.text
    result = daemon.run_checks([], is_stopped=lambda: False, timeout_s=0.0)
    assert result.findings is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--every", "1h"], "--every tells nobody what it finds. Add --metrics-port"),
        (["--metrics-port", "9092"], "--metrics-port is for a doctor that stays"),
        (["--every", "soon", "--metrics-port", "9092"], "Not a time (got 'soon')"),
        (["--every", "1h", "--metrics-port", "99999"], "--metrics-port is no TCP port"),
        (["--every", "1h", "--metrics-port", "9092", "--json"], "--every checks one machine"),
        (["--checks", "gpu"], "Did you mean 'gpus'?"),
    ],
)
def test_wrong_usage_is_said(words, said, capsys):
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err


def test_checks_that_no_signal_ends_are_left_and_the_node_is_not_checked(tmp_path, monkeypatch):
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 60\n")
    hangs.chmod(0o755)
    left = []
    monkeypatch.setattr(daemon.sys, "executable", str(hangs))
    monkeypatch.setattr(
        daemon.subprocess.Popen, "kill", lambda one: left.append(one)
    )  # as in a driver's call
    monkeypatch.setattr(daemon, "_KILLED_S", 0.5)
    result = daemon.run_checks([], is_stopped=lambda: False, timeout_s=0.0)
    monkeypatch.undo()
    assert result.findings is None
    (process,) = left
    process.kill()
    process.communicate()
