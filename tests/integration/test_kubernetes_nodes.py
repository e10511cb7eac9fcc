"""The test kubelet and the stand-in for JobSet's controller, on a real control plane."""

import json
import time

import pytest
from tests.jobset_controller import jobset_controller
from tests.kubelet import nodes
from tests.kubernetes import JOBSET, cluster
from tests.launched import wait_until

from penstock.launch.pod_networks import PodNetwork
from penstock.launch.render.attach import attach
from penstock.launch.render.pod_template import labels_of

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kubernetes")
    with (
        cluster(folder, controllers=True, definitions=["jobset"]) as found,
        jobset_controller(found),
        nodes(found, folder, "n1", "n2") as room,
    ):
        yield found, room, folder


def pod(name, script, **spec):
    container = {
        "name": "main",
        "image": "test",
        "command": ["bash", "-c", script],
        **spec.pop("container", {}),
    }
    spec = {"restartPolicy": "Never", "containers": [container], **spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"run": name}},
        "spec": spec,
    }


def create(kubernetes, *objects):
    for one in objects:
        status, answer = kubernetes.create(one)
        assert status == 201, answer


def phase(kubernetes, name):
    found = kubernetes.get("Pod", name)
    return found and found["status"]["phase"]


def ended(kubernetes, name):
    wait_until(
        lambda: phase(kubernetes, name) in ("Succeeded", "Failed"), f"an end of {name}", patience_s=PATIENCE_S
    )
    return phase(kubernetes, name), kubernetes.log(name)


def test_a_pod_has_its_volumes_variables_names_and_user(kubernetes):
    found, _, folder = kubernetes
    found.volume("runs", folder / "runs")
    create(
        found,
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "c"},
            "data": {"a.txt": "A", "k": "v"},
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": "hidden"}},
        pod(
            "whole",
            'cat /conf/a.txt; echo "$IP $HIDDEN $PLAIN $(hostname) $(id -u)"; echo kept > /runs/file; '
            "getent hosts me.domain | cut -d' ' -f1; "
            "test -s /var/run/secrets/kubernetes.io/serviceaccount/token || echo no token; "
            "touch /conf/x || echo read-only; exit 3",
            hostname="me",
            subdomain="domain",
            securityContext={"runAsNonRoot": True},
            volumes=[
                {"name": "conf", "projected": {"sources": [{"configMap": {"name": "c"}}]}},
                {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
            ],
            container={
                "env": [
                    {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    {"name": "HIDDEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
                    {"name": "PLAIN", "value": "$(HIDDEN)-too"},
                ],
                "volumeMounts": [
                    {"name": "conf", "mountPath": "/conf", "readOnly": True},
                    {"name": "runs", "mountPath": "/runs"},
                ],
            },
        ),
    )
    state, log = ended(found, "whole")
    address = found.get("Pod", "whole")["status"]["podIP"]
    assert state == "Failed"
    assert log.startswith(f"A{address} hidden hidden-too me 1000670000\n{address}\n"), log
    assert log.endswith("read-only\n")
    assert (folder / "runs" / "file").read_text() == "kept\n"
    terminated = found.get("Pod", "whole")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert terminated["exitCode"] == 3


def test_a_deleted_pod_gets_its_grace_and_no_more(kubernetes):
    found, _, folder = kubernetes
    ready, told = folder / "ready", folder / "told"
    volume = {"name": "v", "hostPath": {"path": str(folder)}}
    mounts = {"volumeMounts": [{"name": "v", "mountPath": "/v"}]}
    script = "trap 'echo TERM > /v/told' TERM; touch /v/ready; while true; do sleep 1000 & wait; done"
    create(
        found, pod("stubborn", script, volumes=[volume], container=mounts, terminationGracePeriodSeconds=2)
    )
    wait_until(ready.exists, "a handler of the signal", patience_s=PATIENCE_S)
    began = time.monotonic()
    found.delete("Pod", "stubborn")
    wait_until(lambda: phase(found, "stubborn") is None, "an end", patience_s=PATIENCE_S)
    assert time.monotonic() - began > 1.5
    assert told.read_text() == "TERM\n"


def jobset(name, script, *, num_pods=2, deadline_s=600, **policy):
    template = {"spec": pod("x", script, terminationGracePeriodSeconds=1)["spec"]}
    job = {"completions": num_pods, "parallelism": num_pods, "completionMode": "Indexed", "backoffLimit": 0}
    codes = {"containerName": "main", "operator": "In", "values": [76]}
    job |= {
        "template": template,
        "activeDeadlineSeconds": deadline_s,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
    }
    spec = {"replicatedJobs": [{"name": "node", "template": {"spec": job}}], "failurePolicy": policy}
    return {
        "apiVersion": JOBSET,
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": "default"},
        "spec": spec,
    }


def final(kubernetes, name):
    def state():
        return kubernetes.get("JobSet", name, api=JOBSET).get("status", {}).get("terminalState")

    return wait_until(state, f"an end of JobSet {name}", patience_s=PATIENCE_S)


def test_pods_of_a_jobset_find_each_other_and_complete(kubernetes):
    found, _, _ = kubernetes
    script = (
        'test "$JOB_COMPLETION_INDEX" = "${HOSTNAME##*-}"; '
        "until getent hosts good-node-0-$((1 - JOB_COMPLETION_INDEX)).good; do sleep 0.1; done"
    )
    create(found, jobset("good", script))
    assert final(found, "good") == "Completed"
    pods = found.all("Pod", labels="jobset.sigs.k8s.io/jobset-name=good")
    assert len(pods) == 2
    found.delete("JobSet", "good", api=JOBSET)
    wait_until(
        lambda: not found.all("Pod", labels="jobset.sigs.k8s.io/jobset-name=good"),
        "garbage",
        patience_s=PATIENCE_S,
    )


def test_a_jobset_restarts_as_its_rules_say(kubernetes):
    found, _, _ = kubernetes
    fatal = [{"name": "fatal", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    create(found, jobset("again", "exit 1", maxRestarts=1, rules=fatal))
    create(found, jobset("never", "exit 76", maxRestarts=9, rules=fatal))
    create(found, jobset("slow", "sleep 1000", deadline_s=1, maxRestarts=1))
    assert final(found, "never") == "Failed"
    assert final(found, "again") == "Failed"
    assert found.get("JobSet", "again", api=JOBSET)["status"]["restarts"] == 1
    assert not found.get("JobSet", "never", api=JOBSET)["status"].get("restarts")
    assert final(found, "slow") == "Failed"
    slow = found.get("JobSet", "slow", api=JOBSET)["status"]
    label = "jobset.sigs.k8s.io/jobset-name=slow"
    wait_until(lambda: not found.all("Pod", labels=label), "the end of its pods", patience_s=PATIENCE_S)
    assert (slow["restarts"], "DeadlineExceeded" in slow["conditions"][0]["message"]) == (1, True), slow


def test_pods_of_a_lost_node_are_missed_by_the_control_plane(kubernetes):
    found, room, _ = kubernetes
    room.add("n3")
    create(found, pod("lonely", "sleep 1000", nodeName="n3"))
    wait_until(lambda: phase(found, "lonely") == "Running", "a start", patience_s=PATIENCE_S)
    room.lose("n3")
    wait_until(
        lambda: "deletionTimestamp" in found.get("Pod", "lonely")["metadata"],
        "an eviction",
        patience_s=PATIENCE_S,
    )
    taints = json.dumps(found.get("Node", "n3")["spec"]["taints"])
    assert "node.kubernetes.io/unreachable" in taints
    found.delete("Node", "n3")


def test_definitions_of_networks_are_accepted_and_misspelt_ones_are_not(kubernetes):
    found, _, _ = kubernetes
    found.install("k8s.cni.cncf.io", "multinic.fms.io")
    card = PodNetwork(master="ens1", subnet="10.1.0.0/24", mtu=9000)
    rail = PodNetwork(master="172.16.0.0/24", type="ipvlan", subnet="10.0.0.0/16")
    (definition,) = attach("job", "default", "nad", [card], pods=2, labels=labels_of("job")).objects
    (network,) = attach("job", "default", "multi-nic-cni", [rail], pods=2, labels=labels_of("job")).objects
    for one in (definition, network):
        status, answer = found.create(one, dry_run=True)
        assert status == 201, answer
        assert answer["spec"] == one["spec"]  # nothing was pruned as unknown
    (status, answer) = found.create({**network, "spec": {**network["spec"], "subnet": 16}}, dry_run=True)
    assert (status, "spec.subnet" in answer["message"]) == (422, True), answer
    misspelt = {**network, "spec": {**network["spec"], "masterNet": []}}
    assert "masterNet" not in found.create(misspelt, dry_run=True)[1]["spec"]
