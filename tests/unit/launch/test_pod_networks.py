"""Networks of pods: what each provider is given, and what is refused before anything is submitted."""

import json
import re
from dataclasses import replace

import pytest

from penstock.core import config as configs
from penstock.core.errors import ConfigError
from penstock.launch.pod_networks import ANNOTATION, PodNetwork, PodNetworks
from penstock.launch.render.attach import attach

CARDS = (
    PodNetwork(master="ens1", mtu=9000, subnet="10.1.0.0/24"),
    PodNetwork(master="ens2", mtu=9000, subnet="10.2.0.0/24"),
)
FUNCTIONS = tuple(
    PodNetwork(type="sriov", resource="openshift.io/nics", subnet=f"10.{number}.0.0/24") for number in (1, 2)
)

LABELS = {"app.kubernetes.io/instance": "job"}


def plugins(attachment, index=0):
    return json.loads(attachment.objects[index]["spec"]["config"])["plugins"]


def test_each_card_gets_a_definition_and_a_name_that_is_known_before():
    attachment = attach("job", "team", "nad", CARDS, pods=4, labels=LABELS)
    assert [found["metadata"] for found in attachment.objects] == [
        {"name": "job-net1", "namespace": "team", "labels": LABELS},
        {"name": "job-net2", "namespace": "team", "labels": LABELS},
    ]
    assert json.loads(attachment.annotations[ANNOTATION]) == [
        {"name": "job-net1", "namespace": "team", "interface": "net1"},
        {"name": "job-net2", "namespace": "team", "interface": "net2"},
    ]
    assert [plugin["type"] for plugin in plugins(attachment)] == ["macvlan", "tuning"]
    assert plugins(attachment)[0]["ipam"] == {"type": "whereabouts", "range": "10.1.0.0/24"}
    assert plugins(attachment)[1]["mtu"] == 9000


def test_a_gateway_is_reached_by_source_and_the_card_keeps_its_own_route():
    card = PodNetwork(master="ens1", type="ipvlan", subnet="10.1.0.0/24", gateway="10.1.0.1")
    assert plugins(attach("job", "team", "nad", [card], labels=LABELS))[-1] == {
        "type": "sbr",
        "addSourceHints": True,
    }


def test_functions_of_a_device_plugin_are_requested_once_for_each_card():
    attachment = attach("job", "team", "nad", FUNCTIONS, labels=LABELS)
    assert attachment.resources == {"openshift.io/nics": "2"}
    for found in attachment.objects:
        assert found["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/resourceName": "openshift.io/nics"}
    assert plugins(attachment)[0] == {"type": "sriov", "ipam": plugins(attachment)[0]["ipam"]}


@pytest.mark.parametrize(
    ("ipam", "address", "expected"),
    [
        ("host-local", "", {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}]]}),
        ("static", "10.1.0.7/24", {"type": "static", "addresses": [{"address": "10.1.0.7/24"}]}),
    ],
)
def test_addresses_of_one_pod_need_no_whereabouts(ipam, address, expected):
    card = PodNetwork(master="ens1", subnet="10.1.0.0/24", ipam=ipam, address=address)
    assert plugins(attach("job", "team", "nad", [card], labels=LABELS))[0]["ipam"] == expected
    with pytest.raises(ConfigError, match=r"up to 2 pods, which would get the same addresses"):
        attach("job", "team", "nad", [card], pods=2, labels=LABELS)


def test_dra_chooses_cards_by_attribute_and_gpus_on_the_same_pcie_root():
    cards = [
        PodNetwork(attributes={"rdma": True, "numaNode": node}, mtu=9000, gpu_class="gpu.nvidia.com")
        for node in (0, 1)
    ]
    attachment = attach("job", "team", "dra", cards, gpus=8, labels=LABELS)
    (template,) = attachment.objects
    devices = template["spec"]["spec"]["devices"]
    assert [(r["name"], r["exactly"]["count"]) for r in devices["requests"]] == [
        ("net1", 1), ("gpus-net1", 4), ("net2", 1), ("gpus-net2", 4),
    ]  # fmt: skip
    assert devices["constraints"] == [
        {"requests": [net, f"gpus-{net}"], "matchAttribute": "resource.kubernetes.io/pcieRoot"}
        for net in ("net1", "net2")
    ]
    assert devices["config"][0]["opaque"]["parameters"] == {"interface": {"name": "net1", "mtu": 9000}}
    assert attachment.holds_gpus
    assert attachment.resource_claims == [
        {"name": "networks", "resourceClaimTemplateName": template["metadata"]["name"]},
    ]
    with pytest.raises(ConfigError, match=r"equal share of the pod's GPUs \(got '7 GPUs'\)"):
        attach("job", "team", "dra", cards, gpus=7, labels=LABELS)


def test_other_cards_are_claimed_by_another_template_as_one_cannot_be_changed():
    def name(gpus, *masters):
        cards = [PodNetwork(master=master, gpu_class="gpu.nvidia.com") for master in masters]
        (template,) = attach("job", "team", "dra", cards, gpus=gpus, labels=LABELS).objects
        return template["metadata"]["name"]

    assert name(8, "ens1").startswith("job-networks-")
    assert name(8, "ens1") == name(8, "ens1")
    assert len({name(8, "ens1"), name(4, "ens1"), name(8, "ens2"), name(8, "ens1", "ens2")}) == 4


def test_dra_objects_are_what_the_current_schema_allows_and_a_misspelt_field_is_not():
    validate = pytest.importorskip("kubernetes_validate")
    cards = [PodNetwork(master="ens1", gpu_class="gpu.nvidia.com"), PodNetwork(attributes={"rdma": True})]
    attachment = attach("job", "team", "dra", cards, gpus=8, labels=LABELS)
    (template,) = attachment.objects
    validate.validate(template, "1.37", strict=True)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"},
        "spec": {
            "resourceClaims": attachment.resource_claims,
            "containers": [
                {"name": "c", "image": "i", "resources": {"claims": attachment.container_claims}},
            ],
        },
    }
    validate.validate(pod, "1.37", strict=True)
    text = json.dumps(template).replace("matchAttribute", "matchAttributes")
    with pytest.raises(validate.ValidationError, match="matchAttributes"):
        validate.validate(json.loads(text), "1.37", strict=True)


def test_one_multi_nic_network_has_all_cards():
    cards = [
        PodNetwork(master=f"172.16.{rail}.0/24", type="ipvlan", mtu=9000, subnet="10.0.0.0/16")
        for rail in range(4)
    ]
    attachment = attach("job", "team", "multi-nic-cni", cards, pods=4, labels=LABELS)
    (network,) = attachment.objects
    name = network["metadata"]["name"]
    assert re.fullmatch("team-job-[0-9a-f]{8}", name)
    (other,) = attach("b-job", "team-a", "multi-nic-cni", cards, labels=LABELS).objects
    (like,) = attach("job", "team-a-b", "multi-nic-cni", cards, labels=LABELS).objects
    assert other["metadata"]["name"] != like["metadata"]["name"], "it belongs to the cluster"
    assert network["metadata"] == {"name": name, "labels": LABELS}
    assert attachment.annotations == {ANNOTATION: name}
    assert network["spec"]["masterNets"] == [card.master for card in cards]
    assert network["spec"]["plugin"]["args"] == {"mode": "l3", "mtu": "9000"}
    assert json.loads(network["spec"]["ipam"])["interfaceBlock"] == 2
    small = replace(cards[0], subnet="10.0.0.0/24")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.0/24.*Give a larger one"):
        attach("job", "team", "multi-nic-cni", [small], labels=LABELS)


def card(**keys):
    return PodNetwork(**{"master": "ens1", "subnet": "10.1.0.0/24", **keys})


@pytest.mark.parametrize(
    ("provider", "keys", "words"),
    [
        ("nda", [{}], r"Unknown network provider \(got 'nda'\)\. Did you mean 'nad'"),
        ("nad", [{}, {"subnet": "10.2.0.0/24"}], r"2 networks have the same master \(got 'ens1'\)"),
        ("nad", [{}, {"master": "ens2", "subnet": "10.1.0.0/16"}], r"overlap.*10\.1\.0\.0/24 and 10\.1\.0"),
        ("nad", [{"subnet": ""}], r"A network has no subnet \(got 'ens1'\)"),
        ("nad", [{"type": "sriov"}], r'needs the resource of its virtual functions \(got \'ens1\'\)'),
        ("nad", [{"resource": "x/y"}], r'"macvlan" needs a master, and takes no resource'),
        ("nad", [{"attributes": {"rdma": True}}], r"are for the provider dra \(got 'nad'\)"),
        ("dra", [{"gateway": "10.1.0.1"}], r"with the addresses and routes of the node \(got 'ens1'\)"),
        ("dra", [{"master": ""}], r"chooses no card"),
        ("dra", [{"attributes": {"a b": 1}}], r"no attribute of DRANET \(got 'a b'\)"),
        ("multi-nic-cni", [{"master": "ens1"}], r"networks\.master is not a network \(got 'ens1'\)"),
        ("multi-nic-cni", [{"type": "host-device"}], r"by macvlan or ipvlan \(got 'host-device'\)"),
    ],
)  # fmt: skip
def test_networks_that_a_provider_cannot_give_are_refused(provider, keys, words):
    with pytest.raises(ConfigError, match=words):
        attach("job", "team", provider, [card(**each) for each in keys], labels=LABELS)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"subnet": "10.1.0.5/24"}, r"not a network \(got '10\.1\.0\.5/24'\)\. Write its first address"),
        ({"gateway": "10.9.0.1"}, r"gateway must be an address of the subnet 10\.1\.0\.0/24 \(got '10\.9"),
        ({"mtu": 100}, r"mtu must be from 1280 to 16,384 \(got 100\)"),
        ({"mtu": -1}, r"mtu must be from 1280 to 16,384 \(got -1\)"),
        ({"mtu": 20_000}, r"mtu must be from 1280 to 16,384 \(got 20000\)"),
        ({"master": "e" * 16}, r"networks\.master takes .* 15 characters.*got 'eeeeeeeeeeeeeeee'"),
        ({"master": "a/b"}, r"networks\.master takes .*got 'a/b'"),
        ({"master": "a b"}, r"networks\.master takes .*got 'a b'"),
        (
            {"sysctls": {"kernel.shmmax": "1"}},
            r"networks\.sysctls takes settings of the network.*got 'kernel\.shmmax'",
        ),
        ({"sysctls": {"net.a;b": "1"}}, r"networks\.sysctls takes .*got 'net\.a;b'"),
        ({"sysctls": {"net.ipv4.tcp_rmem": "1\n2"}}, r"sets net\.ipv4\.tcp_rmem to what is no value"),
        ({"resource": "nics"}, r"networks\.resource takes the name of a resource of nodes \(got 'nics'\)"),
        ({"ipam": "static"}, r"networks\.address is for ipam = 'static', which needs it"),
    ],
)
def test_a_network_that_makes_no_sense_is_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        card(**keys)


def test_a_file_of_networks_is_read_strictly():
    raw = {"provider": "dra", "networks": [{"master": "ens1", "attributes": {"rdma": True}}]}
    assert configs.build(PodNetworks, raw).networks[0].attributes == {"rdma": True}
    with pytest.raises(ConfigError, match=r"Did you mean 'mtu'"):
        configs.build(PodNetworks, {"networks": [{"master": "ens1", "mut": 9000}]})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"provider": "nad"}, r"The file of networks has no \[\[networks\]\]"),
        ({"provider": "multus", "networks": [{"master": "ens1"}]}, r"provider \(got 'multus'\)"),
    ],
)
def test_a_file_that_declares_nothing_or_for_nobody_is_refused(raw, words):
    with pytest.raises(ConfigError, match=words):
        configs.build(PodNetworks, raw)


def test_a_run_without_networks_needs_nothing():
    assert not attach("job", "team", "nad", [], labels=LABELS).objects
