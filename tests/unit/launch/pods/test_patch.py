"""What a patch of the pods may set; all else is refused by its path, and nothing that was set is weakened."""

import argparse
import json
import sys
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.operator import plan_of
from penstock.cli.pods import add_pod_arguments, pod_spec
from penstock.core.errors import PenstockError, UsageError
from penstock.launch.engines.kubernetes_queue import QueueQuota, check_quota
from penstock.launch.pods.patch import read_patch
from penstock.launch.pods.pod import PodSpec
from penstock.launch.render.kubernetes import render_kubernetes
from penstock.launch.render.serving import render_serving
from penstock.launch.spec import RunSpec, node_range
from tests.examples import examples
from tests.unit.cli.test_operator import run
from tests.unit.launch.render.test_kubernetes import check, make_pod_spec
from tests.unit.launch.render.test_serving import make_serving

GPU = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
NODE_TERM = {"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a", "b"]}]}
WHOLE = {
    "metadata": {
        "annotations": {"team": "a", "prometheus.io/scrape": "true"},
        "labels": {"cost-center": "7"},
    },
    "spec": {
        "tolerations": [GPU],
        "imagePullSecrets": [{"name": "registry"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [NODE_TERM]}
            },
            "podAntiAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "weight": 5,
                        "podAffinityTerm": {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"app": "noisy"}},
                        },
                    }
                ]
            },
        },
        "containers": [
            {"name": "node", "resources": {"requests": {"ephemeral-storage": "9Gi", "rdma/hca": 1}}}
        ],
    },
}


def template_of(rendered):
    """Return the pod template of a rendered run or server."""
    job = rendered.objects[-1]["spec"]
    return (job["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in job else job)["template"]


def patched(patch, **pod):
    return template_of(render_kubernetes(make_pod_spec(pod={"patch": json.dumps(patch), **pod})))


def test_every_listed_field_reaches_the_pods_beside_those_that_were_there():
    pod = {"device": "nvidia.com/gpu", "cpu": "4", "excluded_nodes": ("n7",)}
    before, found = template_of(render_kubernetes(make_pod_spec(pod=pod))), patched(WHOLE, **pod)
    meta, spec = found["metadata"], found["spec"]
    assert meta["labels"] == before["metadata"]["labels"] | {"cost-center": "7"}
    assert meta["annotations"] == WHOLE["metadata"]["annotations"]
    assert spec["tolerations"] == [*before["spec"]["tolerations"], GPU]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    excluded = [{"key": "metadata.name", "operator": "NotIn", "values": ["n7"]}]
    assert term == NODE_TERM | {"matchFields": excluded}, (
        "of the terms one must hold: each leaves the node out"
    )
    assert spec["affinity"]["podAntiAffinity"] == WHOLE["spec"]["affinity"]["podAntiAffinity"]
    assert spec["containers"][0]["resources"] == {
        "requests": {"nvidia.com/gpu": "1", "cpu": "4", "ephemeral-storage": "9Gi", "rdma/hca": "1"},
        "limits": {"nvidia.com/gpu": "1", "cpu": "4"},
    }


def test_a_patched_run_and_server_are_as_published_schemas_have_them():
    for found in render_kubernetes(make_pod_spec(pod={"patch": json.dumps(WHOLE)}, ttl_s=90.5)).objects:
        check(found)
        if found["kind"] == "JobSet":
            assert found["spec"]["ttlSecondsAfterFinished"] == 91
    served = deepcopy(WHOLE)
    served["spec"]["containers"][0]["name"] = "server"
    for found in render_serving(make_serving(pod=PodSpec(image="a", patch=json.dumps(served)))).objects:
        check(found)


def test_pods_of_kserve_get_the_patch_too():
    patch = {"metadata": {"labels": {"team": "a"}}, "spec": {"tolerations": [GPU]}}
    rendered = render_serving(make_serving(is_kserve=True, pod=PodSpec(image="a", patch=json.dumps(patch))))
    predictor = rendered.objects[-1]["spec"]["predictor"]
    assert (predictor["labels"], predictor["tolerations"][-1]) == ({"team": "a"}, GPU)


def test_excluded_nodes_are_left_out_whatever_terms_there_are():
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    own = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n7"]}]}
    patch = {"spec": {"affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": [NODE_TERM, own]}}}}}
    found = patched(patch, excluded_nodes=("n7",))["spec"]["affinity"]["nodeAffinity"][required]
    excluded = {"key": "metadata.name", "operator": "NotIn", "values": ["n7"]}
    assert [term["matchFields"][-1] for term in found["nodeSelectorTerms"]] == [excluded, excluded]


TERM = {"topologyKey": "zone", "labelSelector": {"matchLabels": {"app": "a"}}}
REFUSED = {
    "apiVersion": {"apiVersion": "v1"},
    "metadata.name": {"metadata": {"name": "a"}},
    "metadata.ownerReferences": {"metadata": {"ownerReferences": [{"kind": "Node"}]}},
    "metadata.finalizers": {"metadata": {"finalizers": ["a/b"]}},
    **{
        f"metadata.annotations.{key}": {"metadata": {"annotations": {key: "x"}}}
        for key in (
            "container.apparmor.security.beta.kubernetes.io/node",
            "seccomp.security.alpha.kubernetes.io/pod",
            "k8s.v1.cni.cncf.io/networks",
            "cdi.k8s.io/gpus",
            "devices.nri.io/container.node",
            "io.kubernetes.cri-o.Devices",
            "io.katacontainers.config.hypervisor.path",
            "org.systemd.property.MemoryMax",
            "run.oci.keep_original_groups",
            "sidecar.istio.io/userVolume",
            "vault.hashicorp.com/agent-inject",
            "iam.amazonaws.com/role",
            "kueue.x-k8s.io/podset-required-topology",
        )
    },
    **{
        f"metadata.labels.{key}": {"metadata": {"labels": {key: "x"}}}
        for key in (
            "app.kubernetes.io/instance",
            "azure.workload.identity/use",
            "kueue.x-k8s.io/queue-name",
            "jobset.sigs.k8s.io/jobset-name",
            "sidecar.istio.io/inject",
            "batch.kubernetes.io/job-name",
            "job-name",
        )
    },
    **{
        f"spec.{key}": {"spec": {key: value}}
        for key, value in {
            "hostNetwork": True,
            "hostPID": True,
            "hostIPC": True,
            "hostUsers": True,
            "shareProcessNamespace": True,
            "serviceAccountName": "admin",
            "serviceAccount": "admin",
            "automountServiceAccountToken": True,
            "securityContext": {"runAsUser": 0},
            "volumes": [{"name": "root", "hostPath": {"path": "/"}}],
            "initContainers": [{"name": "a", "image": "b"}],
            "ephemeralContainers": [{"name": "a"}],
            "nodeName": "n1",
            "nodeSelector": {"a": "b"},
            "priorityClassName": "system-node-critical",
            "priority": 9,
            "runtimeClassName": "kata",
            "schedulerName": "mine",
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": 0,
            "activeDeadlineSeconds": 1,
            "dnsPolicy": "Default",
            "hostAliases": [{"ip": "1.2.3.4"}],
            "resourceClaims": [{"name": "a"}],
            "enableServiceLinks": True,
            "schedulingGates": [{"name": "a"}],
            "overhead": {"cpu": "1"},
            "$setElementOrder/containers": [{"name": "node"}],
            "$patch": "replace",
        }.items()
    },
    **{
        f"spec.containers[0].{key}": {"spec": {"containers": [{key: value}]}}
        for key, value in {
            "securityContext": {"privileged": True},
            "volumeMounts": [{"name": "tmp", "mountPath": "/etc"}],
            "volumeDevices": [{"name": "a"}],
            "command": ["sh"],
            "args": ["-c"],
            "image": "evil",
            "env": [{"name": "A", "value": "b"}],
            "envFrom": [{"secretRef": {"name": "a"}}],
            "ports": [{"hostPort": 22, "containerPort": 22}],
            "lifecycle": {"preStop": {}},
            "livenessProbe": {},
            "$patch": "delete",
        }.items()
    },
    "spec.containers[1]": {"spec": {"containers": [{"name": "node"}, {"name": "node"}]}},
    "spec.containers[0].name": {"spec": {"containers": [{"name": "other"}]}},
    "spec.containers[0].resources.claims": {"spec": {"containers": [{"resources": {"claims": []}}]}},
    "spec.containers[0].resources.limits.memory": {
        "spec": {"containers": [{"resources": {"limits": {"memory": "900Gi"}}}]}
    },
    "spec.containers[0].resources.limits.nvidia.com/gpu": {
        "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "8"}}}]}
    },
    "spec.containers[0].resources.limits.cpu": {
        "spec": {"containers": [{"resources": {"limits": {"cpu": None}}}]}
    },
    "spec.tolerations[0]": {"spec": {"tolerations": [{"operator": "Exists"}]}},
    "spec.tolerations[1].key": {"spec": {"tolerations": [GPU, GPU | {"key": ""}]}},
    "spec.tolerations[0].key": {"spec": {"tolerations": [GPU | {"key": "node.kubernetes.io/unschedulable"}]}},
    **{
        f"spec.tolerations[{index}].key": {"spec": {"tolerations": [GPU] * index + [GPU | {"key": key}]}}
        for index, key in enumerate(
            (
                "node-role.kubernetes.io/controlplane",
                "node-role.kubernetes.io/control-plane",
                "node-role.kubernetes.io/etcd",
                "node.cloudprovider.kubernetes.io/uninitialized",
                "node.cluster.x-k8s.io/uninitialized",
                "CriticalAddonsOnly",
            ),
            start=2,
        )
    },
    "spec.imagePullSecrets[0]": {"spec": {"imagePullSecrets": [{}]}},
    "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].namespaces": {
        "spec": {
            "affinity": {
                "podAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [TERM | {"namespaces": ["kube-system"]}]
                }
            }
        }
    },
    "spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].namespaceSelector": {
        "spec": {
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [TERM | {"namespaceSelector": {}}]
                }
            }
        }
    },
    "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]": {
        "spec": {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}]}
                }
            }
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("path", REFUSED)
def test_a_training_run_with_another_field_is_invalid_and_names_its_path(path):
    with pytest.raises(PenstockError) as caught:
        render_kubernetes(
            plan_of(run(podPatch=REFUSED[path], device="nvidia.com/gpu", memory="8Gi"), ()).spec
        )
    assert f"--pod-patch: {path} is refused: " in str(caught.value)


NAMES = st.sampled_from(
    [
        *("metadata", "spec", "containers", "securityContext", "hostNetwork", "hostPID", "volumes", "env"),
        *("volumeMounts", "name", "resources", "limits", "requests", "cpu", "memory", "privileged", "labels"),
        *("annotations", "tolerations", "key", "operator", "serviceAccountName", "affinity", "podAffinity"),
        *("team", "image", "app.kubernetes.io/instance", "$patch", "imagePullSecrets", "nvidia.com/gpu"),
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.sampled_from(["", "a", "1Gi", "Exists", "\x00", "n7"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@examples(60)
@given(
    JSON, st.lists(st.sampled_from([("spec",), ("spec", "containers", 0), ("metadata",)]), max_size=2), NAMES
)
def test_no_patch_changes_what_protects_the_cluster(drawn, places, name):
    """Drawn values alone, and at a place in a patch that is accepted."""
    patch = deepcopy(WHOLE) if places else drawn
    for place in places:
        at = patch
        for key in place:
            at = at[key]
        at[name] = drawn
    pod = {"device": "nvidia.com/gpu", "memory": "8Gi", "excluded_nodes": ("n7",), "service_account": "mine"}
    before = template_of(render_kubernetes(make_pod_spec(pod=pod)))
    try:
        found = patched(patch, **pod)
    except UsageError:
        return
    allowed = {"tolerations", "imagePullSecrets", "affinity", "containers"}
    assert {key: value for key, value in found["spec"].items() if key not in allowed} == {
        key: value for key, value in before["spec"].items() if key not in allowed
    }
    (was,), (container,) = before["spec"]["containers"], found["spec"]["containers"]
    assert container | {"resources": was["resources"]} == was
    for kind in ("requests", "limits"):
        assert was["resources"][kind].items() <= container["resources"][kind].items()
    assert before["metadata"]["labels"].items() <= found["metadata"]["labels"].items()
    assert before["spec"]["tolerations"][0] in found["spec"]["tolerations"]


def options(*words):
    parser = argparse.ArgumentParser()
    add_pod_arguments(parser)
    return pod_spec(parser.parse_args(["--image=a", *map(str, words)]))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("a: [", "expected the node content"),
        ("[" * 16_000, "is not valid YAML: maximum recursion depth exceeded"),
        ("[" * 20_000, "--pod-patch takes a text file of at most 16,384 bytes"),
        ("spec: &a {tolerations: []}\nmetadata: *a", "it has an anchor that is used again"),
        ("spec: {}\nspec: {}", "it has the key spec twice"),
        ("metadata: {labels: {on: a}}", "the key on is no text: write it in quotes"),
        ("metadata: {labels: {a: !!timestamp 2026-01-01}}", "date is not JSON"),
        ("spec: {a: .nan}", "not JSON compliant"),
        ("- a", "--pod-patch takes a table, such as"),
        ("--- {}\n--- {}", "expected a single document"),
        ("a: !!python/object/apply:os.system [id]", "could not determine a constructor"),
        ("#" * 70_000, "--pod-patch takes a text file of at most 16,384 bytes"),
        (
            f"metadata: {{annotations: {{a: {'b' * 2000}}}}}",
            "metadata.annotations.a is refused: it takes a text of at most 1,024",
        ),
        (f"metadata: {{labels: {{a: {'b' * 100}}}}}", "the value of a label: at most 63 letters"),
        (
            "metadata: {labels: {a: 1}}",
            "metadata.labels.a is refused: it takes the value of a label: at most 63",
        ),
    ],
    ids=range(16),
)
def test_files_that_are_no_patch_are_refused_in_words(tmp_path: Path, text, said):
    (tmp_path / "patch.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        options("--pod-patch", tmp_path / "patch.yaml")
    assert said in str(caught.value)


def test_the_options_of_a_pod_take_a_file(tmp_path: Path):
    (tmp_path / "patch.yaml").write_text("spec:\n  tolerations:\n  - {key: gpu, operator: Exists}\n")
    found = options("--pod-patch", tmp_path / "patch.yaml")
    assert json.loads(found.patch) == {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}


def test_a_date_is_the_text_that_was_written(tmp_path: Path):
    (tmp_path / "patch.yaml").write_text("metadata: {annotations: {a: 2024-01-01, 2024-01-02: b}}")
    found = json.loads(options("--pod-patch", tmp_path / "patch.yaml").patch)
    assert found == {"metadata": {"annotations": {"a": "2024-01-01", "2024-01-02": "b"}}}


def test_a_file_of_json_is_not_read_as_yaml(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "patch.json").write_text(json.dumps(WHOLE))
    assert json.loads(options("--pod-patch", tmp_path / "patch.json").patch) == WHOLE
    assert plan_of(run(podPatch=WHOLE), ()).spec
    (tmp_path / "patch.json").write_text("[" * 16_000)
    with pytest.raises(UsageError, match="is not valid JSON"):
        options("--pod-patch", tmp_path / "patch.json")


def test_keys_of_a_domain_are_opened_by_who_runs_the_operator_but_never_those_of_the_cluster(monkeypatch):
    monkeypatch.setenv("PENSTOCK_POD_KEYS", "example.com/, kubernetes.io/,app.kubernetes.io/")
    assert read_patch(json.dumps({"metadata": {"labels": {"example.com/team": "a"}}}))
    for key in (
        "app.kubernetes.io/instance",
        "kubernetes.io/hostname",
        "other.example.com/a",
        "example.comx/a",
    ):
        with pytest.raises(UsageError, match=r"metadata\.labels\..* is refused"):
            read_patch(json.dumps({"metadata": {"labels": {key: "a"}}}))


def test_a_run_with_opened_keys_is_read_back_where_they_are_not_open_and_not_rendered(monkeypatch):
    monkeypatch.setenv("PENSTOCK_POD_KEYS", "example.com/")
    spec = make_pod_spec(pod={"patch": json.dumps({"metadata": {"labels": {"example.com/team": "a"}}})})
    assert template_of(render_kubernetes(spec))["metadata"]["labels"]["example.com/team"] == "a"
    monkeypatch.delenv("PENSTOCK_POD_KEYS")
    assert RunSpec.read(spec.as_json()) == spec, "as `launch status` and `launch list` do"
    with pytest.raises(UsageError, match=r"metadata\.labels\.example\.com/team is refused"):
        render_kubernetes(spec)


def test_a_queue_counts_what_a_patch_asks_for():
    patch = {
        "spec": {
            "containers": [{"resources": {"limits": {"cpu": 9, "memory": "1Gi"}, "requests": {"cpu": 4}}}]
        }
    }
    spec = make_pod_spec(nodes=node_range("2"), pod={"patch": json.dumps(patch)})
    check_quota(spec, QueueQuota(queue="q", amounts={"cpu": 8.0}))
    with pytest.raises(UsageError, match="Queue q gives at most 7 of cpu"):
        check_quota(spec, QueueQuota(queue="q", amounts={"cpu": 7.0}))


def test_a_trainjob_has_no_time_to_live():
    with pytest.raises(UsageError, match="A TrainJob stays until somebody deletes it"):
        make_pod_spec(nodes=node_range("1"), ttl_s=60.0, pod={"api": "trainjob"})
