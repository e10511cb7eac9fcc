"""Objects of a run on Kubernetes: golden files, and what published schemas say of them."""

import json

import kubernetes_validate as schemas
import pytest
import yaml

from penstock.core.errors import UsageError
from penstock.core.yaml_text import yaml_text
from penstock.launch.pod_networks import PodNetwork
from penstock.launch.pods.pod import OWN_PATHS, PodCode, PodSpec, PodVolume
from penstock.launch.render.jobset import longest_name
from penstock.launch.render.kubernetes import render_kubernetes
from penstock.launch.render.pod_template import labels_of
from penstock.launch.spec import RunSpec, Secret, node_range
from tests.unit.launch.test_spec import make_spec

CARDS = (
    PodNetwork(master="ens1f0", mtu=9000, subnet="10.10.1.0/24"),
    PodNetwork(master="ens2f0", mtu=9000, subnet="10.10.2.0/24"),
)
RUNS = PodVolume(claim="runs", path="/runs")
_MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
"""Kind of an object -> its model in kubeflow_trainer_api."""


def make_pod_spec(*, pod=None, **changes):
    pods = {"image": "registry.example/penstock:0.1", "recipe": "[run]\nsteps = 3\n", "volumes": (RUNS,)}
    values = {
        "command": ("train", "/etc/penstock/recipe.toml"),
        "run_dir": "/runs/first",
        "work_dir": "/runs",
        "python": "python3",
        "pod": PodSpec(**{**pods, **(pod or {})}),
    }
    return make_spec(**{**values, **changes})


SPECS = {
    "bare": make_pod_spec(nodes=node_range("1"), pod={"volumes": ()}),
    "gang": make_pod_spec(
        nodes=node_range("4"),
        processes=8,
        queue="research",
        time_limit_s=86400.0,
        grace_s=120.5,
        environment=(("NOTE", "it's"),),
        secrets=(
            Secret(name="WANDB_API_KEY", source="key:wandb/api-key"),
            Secret(name="HF_TOKEN", source="file:/runs/.token"),
        ),
        pod={
            "device": "nvidia.com/gpu",
            "cpu": "96",
            "memory": "1Ti",
            "code": PodCode(sha256="ab" * 32),
            "required_topology": "cloud.example/rack",
            "networks": CARDS,
            "open_ports": (9400,),
            "fs_group": 1000,
            "service_account": "trainer",
            "priority_class": "batch",
            "node_selector": (("pool", "gpu"),),
        },
    ),
    "elastic_trainjob": make_pod_spec(
        nodes=node_range("2:4"),
        queue="research",
        pod={"api": "trainjob", "preferred_topology": "cloud.example/block"},
    ),
    "dra": make_pod_spec(
        processes=8,
        pod={
            "device": "nvidia.com/gpu",
            "network_provider": "dra",
            "networks": (PodNetwork(master="ens1f0", mtu=9000, gpu_class="gpu.nvidia.com"),),
        },
    ),
}


def check(found):
    """Hold an object against its published schema, with fields that it does not have as errors."""
    if found["kind"] in _MODELS:
        from kubeflow_trainer_api import models  # 0.5 s, which a worker that only collects saves

        model = getattr(models, _MODELS[found["kind"]])
        assert model.from_dict(found).to_dict() == found
        spec = found["spec"].get("template", {}).get("spec", found["spec"])
        for replicated in spec.get("replicatedJobs", []):
            job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
            schemas.validate(job | {"spec": replicated["template"]["spec"]}, "1.34", strict=True)
    elif "k8s.cni.cncf.io" not in found["apiVersion"]:
        schemas.validate(found, "1.34", strict=True)


def pods_of(rendered):
    """Return the pod specification of a rendered run."""
    job = next(found for found in rendered.objects if found["kind"] in ("JobSet", "TrainingRuntime"))
    spec = job["spec"].get("template", {}).get("spec", job["spec"])
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", SPECS)
def test_the_objects_are_the_golden_ones(golden, name):
    rendered = render_kubernetes(SPECS[name])
    golden(
        f"kubernetes_{name}.json",
        {"objects": list(rendered.objects), "settings": [str(setting) for setting in rendered.settings]},
    )


@pytest.mark.parametrize("name", SPECS)
def test_every_object_is_as_published_schemas_have_it(name):
    for found in render_kubernetes(SPECS[name]).objects:
        check(found)
        assert yaml.safe_load(yaml_text(found)) == found


@pytest.mark.parametrize("name", SPECS)
def test_every_object_has_the_labels_by_which_the_next_job_of_this_name_knows_it(name):
    for found in render_kubernetes(SPECS[name]).objects:
        assert labels_of("first").items() <= found["metadata"]["labels"].items(), found["kind"]


@pytest.mark.parametrize("name", SPECS)
def test_a_network_policy_lets_the_pods_of_a_run_reach_each_other_and_no_other_pod_reach_them(name):
    objects = render_kubernetes(SPECS[name]).objects
    (policy,) = [found["spec"] for found in objects if found["kind"] == "NetworkPolicy"]
    job = next(found for found in objects if found["kind"] in ("JobSet", "TrainingRuntime"))
    spec = job["spec"].get("template", {}).get("spec", job["spec"])
    labels = spec["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items(), "it is of the run's pods"
    peers, *others = policy["ingress"]
    assert peers == {"from": [{"podSelector": policy["podSelector"]}]}
    ports = SPECS[name].pod.open_ports
    assert others == ([{"ports": [{"protocol": "TCP", "port": port} for port in ports]}] if ports else [])


@pytest.mark.parametrize(
    ("pod", "said"),
    [
        ({"volumes": (RUNS, PodVolume(claim="b", path="/runs"))}, "something else is mounted"),
        ({"volumes": (RUNS, PodVolume(claim="b", path="/tmp"))}, "'b:/tmp'"),
        ({"fs_group": -5}, "--fs-group takes the number of a group"),
        ({"excluded_nodes": ("n 1",)}, "--exclude-node takes the name"),
        ({"network_policy": "all"}, "--network-policy takes one of run, none"),
        ({"required_topology": "a/rack", "preferred_topology": "a/row"}, "a/row.*Keep one of them"),
    ],
)
def test_pods_that_a_server_would_refuse_are_refused_before(pod, said):
    with pytest.raises(UsageError, match=said):
        make_pod_spec(pod=pod)


@pytest.mark.parametrize("name", SPECS)
def test_paths_that_claims_may_not_take_are_those_of_every_pod(name):
    (container,) = pods_of(render_kubernetes(SPECS[name]))["containers"]
    claims = {volume.path for volume in SPECS[name].pod.volumes}
    assert {mount["mountPath"] for mount in container["volumeMounts"]} - claims <= set(OWN_PATHS)


def test_a_run_may_do_without_a_network_policy_and_is_told_what_that_means():
    rendered = render_kubernetes(make_pod_spec(pod={"network_policy": "none"}))
    assert "NetworkPolicy" not in [found["kind"] for found in rendered.objects]
    (setting,) = [setting for setting in rendered.settings if setting.name == "NetworkPolicy"]
    assert "anyone who reaches the ports of the ranks can disturb the run" in setting.reason


@pytest.mark.parametrize("name", SPECS)
def test_a_misspelt_field_is_refused_by_those_schemas(name):
    found = json.loads(json.dumps(render_kubernetes(SPECS[name]).objects[-1]))
    found["spec"]["replicatedJob"] = []
    with pytest.raises(AssertionError):
        check(found)


@pytest.mark.parametrize("name", SPECS)
def test_pods_meet_the_restricted_standard(name):
    spec = pods_of(render_kubernetes(SPECS[name]))
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "runAsUser" not in spec["securityContext"]  # OpenShift refuses all but its own
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim"}
    assert all(set(volume) - {"name"} <= allowed for volume in spec["volumes"])


def test_the_pods_read_back_the_specification_without_its_recipe():
    spec = SPECS["gang"]
    (config, *_) = render_kubernetes(spec).objects
    read = RunSpec.read(json.loads(config["data"]["spec.json"]))
    assert read.resized(spec.nodes).as_json() == {
        **spec.as_json(),
        "pod": {**spec.as_json()["pod"], "recipe": ""},
    }
    assert config["data"]["recipe.toml"] == spec.pod.recipe


def test_names_of_pods_fit_into_a_label_of_dns():
    most = "a" * longest_name(4)
    render_kubernetes(make_pod_spec(name=most, nodes=node_range("4")))
    assert len(f"{most}-node-0-3-xxxxx") == 63
    for name in (f"{most}a", "First", "1st", "a.b"):
        with pytest.raises(UsageError, match="at most 48 lower-case letters"):
            render_kubernetes(make_pod_spec(name=name, nodes=node_range("4")))


def test_a_volume_for_one_node_is_refused_for_several():
    pod = {"volumes": (PodVolume(claim="disk", path="/runs", access_mode="ReadWriteOnce"),)}
    render_kubernetes(make_pod_spec(nodes=node_range("1"), pod=pod))
    with pytest.raises(UsageError, match="Claim disk is ReadWriteOnce"):
        render_kubernetes(make_pod_spec(nodes=node_range("1:2"), pod=pod))


@pytest.mark.parametrize("volumes", [(), (PodVolume(claim="data", path="/data"),)])
def test_pods_on_several_nodes_need_the_runs_folder_in_a_volume(volumes):
    render_kubernetes(make_pod_spec(nodes=node_range("1"), pod={"volumes": volumes}))
    for nodes in ("2", "1:2"):
        with pytest.raises(UsageError, match="The run's folder is in no volume"):
            render_kubernetes(make_pod_spec(nodes=node_range(nodes), pod={"volumes": volumes}))


def test_a_run_folder_that_leaves_its_volume_is_in_none():
    render_kubernetes(make_pod_spec(run_dir="/runs/second/../first"))
    with pytest.raises(UsageError, match="The run's folder is in no volume"):
        render_kubernetes(make_pod_spec(run_dir="/runs/../out"))


def test_a_variable_of_the_shell_is_no_secret_of_a_pod():
    with pytest.raises(UsageError, match="an object would hold its value"):
        render_kubernetes(make_pod_spec(secrets=(Secret(name="KEY", source="env:KEY"),)))
