"""Objects of a server on Kubernetes: golden files, published schemas, and the time for answers to end."""

import json
from pathlib import Path

import kubernetes_validate as schemas
import pytest

from penstock.core.errors import UsageError
from penstock.launch.pods.pod import PodSpec, PodVolume
from penstock.launch.render.kubernetes import render_kubernetes
from penstock.launch.render.serving import render_serving
from penstock.launch.serving import ServingSpec
from penstock.launch.spec import Secret, node_range
from tests.unit.launch.render.test_kubernetes import make_pod_spec

KSERVE = json.loads(Path(__file__).with_name("kserve_fields.json").read_text())


def make_serving(**changes):
    volumes = (PodVolume(claim="models", path="/models"),)
    values = {
        "name": "chat",
        "model": "/models/tiny",
        "python": "python3",
        "pod": PodSpec(image="registry.example/penstock:0.1", volumes=volumes),
        "replicas": node_range("1"),
        "secrets": (Secret(name="PENSTOCK_API_KEY", source="key:penstock/key"),),
    }
    return ServingSpec(**{**values, **changes})


SPECS = {
    "fixed": make_serving(replicas=node_range("2"), options=("--max-sequences=64",)),
    "scaled": make_serving(
        replicas=node_range("1:8"),
        devices=2,
        pod=PodSpec(image="registry.example/penstock:0.1", device="nvidia.com/gpu", memory="64Gi"),
    ),
    "kserve": make_serving(is_kserve=True, replicas=node_range("1:4")),
}


@pytest.mark.parametrize("name", SPECS)
def test_the_objects_are_the_golden_ones(golden, name):
    rendered = render_serving(SPECS[name])
    golden(
        f"kubernetes_serve_{name}.json",
        {"objects": list(rendered.objects), "settings": [str(setting) for setting in rendered.settings]},
    )


@pytest.mark.parametrize("name", SPECS)
def test_every_object_is_as_published_schemas_have_it(name):
    for found in render_serving(SPECS[name]).objects:
        if found["kind"] == "InferenceService":
            found = pods_of_kserve(found)
        schemas.validate(found, "1.34", strict=True)


def pods_of_kserve(found):
    """Hold an InferenceService against the fields that KServe publishes; return its pods, as a Pod."""
    check_fields(found, "InferenceService")
    check_fields(found["spec"], "InferenceServiceSpec")
    predictor = found["spec"]["predictor"]
    check_fields(predictor, "PredictorSpec")
    own = ("minReplicas", "maxReplicas", "annotations")  # the others are a PodSpec's
    pods = {key: value for key, value in predictor.items() if key not in own}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": pods}


def check_fields(found, model):
    kinds = {"int": int, "str": str, "bool": bool, "dict": dict, "list": list}
    for key, value in found.items():
        assert key in KSERVE[model], f"{model} has no field {key}"
        assert isinstance(value, kinds.get(KSERVE[model][key].partition("(")[0].partition("[")[0], dict))


def test_a_misspelt_field_of_an_inference_service_is_refused():
    found, scaler = render_serving(SPECS["kserve"]).objects
    assert scaler["spec"]["scaleTargetRef"]["name"] == "chat-predictor", "the Deployment that KServe makes"
    found["spec"]["predictor"]["minReplica"] = 1
    with pytest.raises(AssertionError, match="PredictorSpec has no field minReplica"):
        pods_of_kserve(found)


@pytest.mark.parametrize("name", SPECS)
def test_answers_end_before_the_pod_is_killed(name):
    spec = SPECS[name]
    found = render_serving(spec).objects[0 if spec.is_kserve else 1]["spec"]
    pods = found["predictor"] if spec.is_kserve else found["template"]["spec"]
    (container,) = pods["containers"]
    arguments = container["args"]
    drain_s = float(arguments[arguments.index("--drain-s") + 1])
    leave_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert leave_s + drain_s < pods["terminationGracePeriodSeconds"]
    assert {container[key]["httpGet"]["path"] for key in ("startupProbe", "readinessProbe")} == {"/ready"}


def test_a_grace_in_which_no_answer_could_end_is_refused():
    with pytest.raises(UsageError, match="The grace is too short"):
        make_serving(grace_s=10.5)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"port": 0}, r"--port must be from 1 to 65,535 \(got 0\)"),
        ({"port": 70_000}, r"got 70000"),
        ({"waiting_per_pod": 0}, "--waiting must be at least 1"),
        ({"devices": 0}, "--processes must be at least 1"),
        ({"startup_s": 0.0}, "--startup must be at least 1"),
        ({"grace_s": float("nan")}, r"--grace takes a number .*nan"),
        ({"grace_s": float("inf")}, r"--grace takes a number .*inf"),
    ],
)
def test_numbers_that_a_server_cannot_have_are_refused_by_name(wrong, said):
    with pytest.raises(UsageError, match=said):
        make_serving(**wrong)


def test_a_secret_in_a_file_is_refused_as_no_server_reads_it():
    secrets = (Secret(name="PENSTOCK_API_KEY", source="file:/models/key"),)
    with pytest.raises(UsageError, match=r"reads no secret from a file.*PENSTOCK_API_KEY=key:NAME/KEY"):
        render_serving(make_serving(secrets=secrets))


def test_a_server_serves_no_pod_of_a_run_of_its_name():
    service = next(one for one in render_serving(SPECS["fixed"]).objects if one["kind"] == "Service")
    run = render_kubernetes(make_pod_spec(name=service["metadata"]["name"]))
    trainer = run.objects[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]
    assert not service["spec"]["selector"].items() <= trainer["labels"].items()
