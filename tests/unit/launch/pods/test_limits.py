"""Limits of pods' fields: refused by field and value, and the same in the CRD."""

import re

import pytest
import yaml
from tools.crd import CRD, written

from penstock.core.errors import ConfigError, UsageError
from penstock.launch.pod_networks import PodNetwork
from penstock.launch.pods.pod import PodSpec, PodVolume
from penstock.launch.render.kubernetes import render_kubernetes
from penstock.launch.spec import node_range
from tests.unit.launch.test_spec import make_spec


def pod(**keys):
    return PodSpec(image="image:1", **keys)


def template_of(pod, **changes):
    *_, job = render_kubernetes(make_spec(pod=pod, nodes=node_range("1"), **changes)).objects
    return job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device": "nvidia.com/gpu;x"}, "--device takes the name of a resource of nodes"),
        ({"device": "gpu"}, "--device takes"),
        ({"device": "a b/c"}, "--device takes"),
        ({"cpu": "two"}, "--cpu takes a Kubernetes quantity"),
        ({"memory": "-1Gi"}, "--memory takes a Kubernetes quantity"),
        ({"memory": "\u0661Gi"}, "--memory takes a Kubernetes quantity"),
        ({"cache": "9" * 40}, "--cache takes a Kubernetes quantity"),
        ({"fs_group": -1}, "--fs-group takes the number of a group"),
        ({"fs_group": 2**31}, "--fs-group takes the number of a group"),
        ({"node_selector": (("a b", "x"),)}, "--node-selector takes the key of a label"),
        ({"node_selector": (("A.com/x", "x"),)}, "--node-selector takes the key of a label"),
        ({"node_selector": (("a/b/c", "x"),)}, "--node-selector takes the key of a label"),
        ({"node_selector": (("n" * 64, "x"),)}, "--node-selector takes the key of a label"),
        ({"node_selector": (("a", "x y"),)}, "--node-selector takes LABEL=VALUE"),
        ({"node_selector": (("a", "x" * 64),)}, "--node-selector takes LABEL=VALUE"),
        ({"required_topology": "a;b"}, "--required-topology takes the key of a label"),
        ({"preferred_topology": "-rack"}, "--preferred-topology takes the key of a label"),
        ({"excluded_nodes": ("n1", "N_2")}, "--exclude-node takes the name of a Kubernetes object"),
        ({"namespace": "a.b"}, "--namespace takes the name of a Kubernetes object"),
        ({"service_account": "A"}, "--service-account takes"),
        ({"priority_class": "a" * 254}, "--priority-class takes"),
        ({"namespace": ""}, "--namespace takes"),
        ({"cache": ""}, "--cache takes a Kubernetes quantity"),
        ({"excluded_nodes": ("",)}, "--exclude-node takes"),
        ({"node_selector": (("", "x"),)}, "--node-selector takes the key of a label"),
        ({"device": "nvidia..com/gpu"}, "--device takes"),
        ({"device": "a.-b/c"}, "--device takes"),
        ({"device": "a-.b/c"}, "--device takes"),
        ({"node_selector": (("a..b/c", "d"),)}, "--node-selector takes the key of a label"),
        ({"required_topology": "a.-b/c"}, "--required-topology takes the key of a label"),
        ({"service_account": "a..b"}, "--service-account takes"),
        ({"priority_class": "a.-b"}, "--priority-class takes"),
        ({"excluded_nodes": ("a.b-.c",)}, "--exclude-node takes"),
        ({"excluded_nodes": (f"{'a' * 64}.b",)}, "--exclude-node takes"),
    ],
)
def test_a_field_beyond_its_limit_is_refused_by_name_and_value(keys, said):
    with pytest.raises(UsageError, match=said) as refused:
        pod(**keys)
    assert "(got " in str(refused.value)


@pytest.mark.parametrize("path", ["/a/../b", "/..", "/a/./b", "//a", "/a/", "/", "a", "/a:b", "/a\nb", ""])
def test_a_path_that_is_not_plain_is_refused(path):
    with pytest.raises(UsageError, match="The path of --volume takes CLAIM:PATH"):
        PodVolume(claim="runs", path=path)


SYSTEM = (
    "/proc /proc/self /sys /sys/fs/cgroup /dev /dev/shm/x /etc /etc/ssl /usr /usr/bin /lib64 /bin /boot "
    "/run/secrets /var /var/run/secrets/kubernetes.io /opt /opt/penstock/lib"
)


@pytest.mark.parametrize("path", SYSTEM.split())
def test_a_path_of_the_system_or_the_image_is_refused(path):
    with pytest.raises(UsageError, match=rf"belongs to the system or the image \(got 'runs:{path}'\)"):
        PodVolume(claim="runs", path=path)


@pytest.mark.parametrize(
    "path",
    ["/runs", "/data/etc", "/devices", "/tmp/x", "/mnt", "/home/me", "/opt/data", "/srv", "/var/lib/x"],
)
def test_a_path_of_its_own_is_taken(path):
    assert PodVolume(claim="runs", path=path).path == path


@pytest.mark.parametrize("claim", ["", "a..b", "a.-b", "A"])
def test_a_claim_that_no_cluster_has_is_refused(claim):
    with pytest.raises(UsageError, match="The claim of --volume takes the name of a Kubernetes object"):
        PodVolume(claim=claim, path="/runs")


STATIC = {"ipam": "static", "subnet": "10.0.0.0/24"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"device_class": "a;b"}, "networks.device-class takes the name of a DeviceClass"),
        ({"device_class": ""}, "networks.device-class takes the name of a DeviceClass"),
        ({"gpu_class": "x y"}, "networks.gpu-class takes the name of a DeviceClass"),
        ({"gpu_class": "gpu..com"}, "networks.gpu-class takes the name of a DeviceClass"),
        ({"master": "."}, "networks.master takes the name of an interface"),
        ({"master": ".."}, "networks.master takes the name of an interface"),
        ({"master": "10.0.0.0/99"}, "networks.master is not a network"),
        ({"master": "10.0.0.1/24"}, "networks.master is not a network"),
        ({"sysctls": {"net.core/../../kernel/core_pattern": "x"}}, "networks.sysctls takes settings"),
        ({"sysctls": {"net./../kernel/msgmax": "1"}}, "networks.sysctls takes settings"),
        ({"sysctls": {"net...kernel.msgmax": "1"}}, "networks.sysctls takes settings"),
        ({"sysctls": {"net.": "1"}}, "networks.sysctls takes settings"),
        ({**STATIC, "address": "10.0.0.7"}, "networks.address must have the prefix length of the subnet"),
        ({**STATIC, "address": "10.0.0.7/99"}, "networks.address must have the prefix length"),
        ({**STATIC, "address": "10.0.0.7/16"}, "networks.address must have the prefix length"),
        ({**STATIC, "address": "10.0.0.7/24;x"}, "networks.address must have the prefix length"),
    ],
)
def test_a_card_with_a_name_that_no_machine_has_is_refused(keys, said):
    with pytest.raises(ConfigError, match=said) as refused:
        PodNetwork(**{"master": "eth1", **keys})
    assert "(got " in str(refused.value)


@pytest.mark.parametrize("master", ["ens1f0", "bond0.7", "a..b", "eth0@x", "10.0.1.0/24", "fd00::/64"])
def test_masters_as_machines_have_them_are_taken(master):
    assert PodNetwork(master=master).master == master


def test_a_static_address_as_clusters_have_it_is_taken():
    card = PodNetwork(master="e", **STATIC, address="10.0.0.7/24", gpu_class="gpu.nvidia.com")
    assert card.address == "10.0.0.7/24"


@pytest.mark.parametrize("path", ["/runs", "/a/.b/c..d", "/data sets/\u00e9"])
def test_other_paths_are_taken(path):
    assert PodVolume(claim="runs", path=path).path == path


def test_labels_and_devices_as_clusters_have_them_are_taken():
    pod(
        device="nvidia.com/mig-1g.5gb",
        node_selector=(("topology.kubernetes.io/zone", "eu-1a"), ("gpu", ""), ("a_b.C", "X_1.y")),
        required_topology="cloud.example.com/rack",
        memory="1.5Ti",
    )


@pytest.mark.parametrize("group", [None, 0, 5])
def test_a_group_of_volumes_is_applied_as_it_is_given(group):
    assert template_of(pod(fs_group=group))["securityContext"].get("fsGroup") == group


def test_variables_and_words_reach_pods_as_they_are_written():
    template = template_of(pod(), environment=(("A", "$(HOME) $$ $x"),), python="/opt/$(HOME)/python")
    (container,) = template["containers"]
    found = {one["name"]: one.get("value") for one in container["env"]}
    assert found["A"] == "$$(HOME) $$$$ $$x"
    words = [*container["command"], *container.get("args", ())]
    assert all(re.sub(r"\$\$", "", word).count("$") == 0 for word in words)


@pytest.mark.parametrize(
    ("subnet", "nodes", "fits"),
    [
        ("10.1.0.0/31", "2", False),
        ("10.1.0.0/30", "2", True),
        ("10.1.0.0/30", "3", False),
        ("10.1.0.0/30", "1:3", False),
        ("fd00::/127", "2", True),
        ("fd00::/127", "3", False),
    ],
)
def test_a_subnet_has_an_address_for_each_pod(subnet, nodes, fits):
    networks = (PodNetwork(master="ens1", subnet=subnet),)
    if fits:
        make_spec(pod=pod(networks=networks), nodes=node_range(nodes))
        return
    with pytest.raises(ConfigError, match=rf"addresses for .* pods \(got '{subnet}'\)"):
        make_spec(pod=pod(networks=networks), nodes=node_range(nodes))


def test_the_crd_has_the_limits_of_the_fields():
    text = CRD.read_text()
    assert written(text) == text, "python -m tools.crd"
    (version,) = yaml.safe_load(text)["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert (spec["grace"]["maximum"], spec["fsGroup"]["minimum"]) == (65_535, 0)
    assert re.search(spec["device"]["pattern"], "nvidia.com/gpu")
    assert not re.search(spec["device"]["pattern"], "nvidia.com/gpu;x")
    assert not re.search(spec["volumes"]["items"]["properties"]["path"]["pattern"], "/a/../b")
