"""What a node checks before its ranks start."""

import pytest

from penstock.core.errors import PenstockError, UsageError
from penstock.core.network.nics import Nic
from penstock.launch.nodes import node
from penstock.launch.nodes.node import check_node, check_storage, network_variables, prepare, secret_values
from penstock.launch.spec import Secret
from tests.unit.launch.test_spec import make_spec

NICS = [
    Nic(name="eth0", is_up=True, mtu=1500, addresses=("192.168.0.2/24",), carries_default_route=True),
    Nic(name="net1", is_up=True, mtu=9000, addresses=("10.0.1.2/24",)),
    Nic(name="net2", is_up=True, mtu=9000, addresses=("10.0.2.2/24",)),
    Nic(name="net3", is_up=False, mtu=9000, addresses=("10.0.3.2/24",)),
]
UNUSED = [
    Nic(name="fast", is_up=True, mtu=9000, addresses=("10.0.4.2/24",), speed_mbit_s=100_000),
    Nic(name="bare", is_up=True, mtu=1500),
    Nic(name="local", is_up=True, mtu=1500, addresses=("fe80::1/64",)),
    Nic(name="br0", is_up=True, mtu=1500, addresses=("10.0.5.2/24",), driver="bridge"),
    Nic(name="eno1", is_up=True, mtu=1500, addresses=("10.0.6.2/24",), speed_mbit_s=10_000),
]


def test_named_networks_carry_the_run_and_no_other():
    found = network_variables(("net1", "net2"), NICS)
    assert found["GLOO_SOCKET_IFNAME"] == "net1,net2"
    assert found["NCCL_SOCKET_IFNAME"] == "=net1,net2"
    assert found["NCCL_IB_DISABLE"] == "1"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("net3", "is down"),
        ("net9", "is missing"),
        ("bare", "has no address"),
        ("local", "has no address"),
        ("br0", "is of the kind bridge, and has not the default route"),
        ("eno1", "is less than half as fast as another"),
    ],
)
def test_a_network_that_cannot_carry_the_run_stops_the_node_with_both_lists(name, fault):
    with pytest.raises(PenstockError, match="No other interface is used instead") as caught:
        network_variables(("fast", name), [*NICS, *UNUSED])
    said = f"{name} {fault}. Named: fast, {name}; up are eth0, net1, net2, fast, bare"
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_variable_that_names_other_networks_stops_the_node(name):
    for same in ("", "net1,net2", "=net2,net1"):
        assert network_variables(("net1", "net2"), NICS, {name: same})
    with pytest.raises(PenstockError, match=rf"{name} is set to .* \(net1, net2\) \(got 'lo'\)"):
        network_variables(("net1", "net2"), NICS, {name: "lo"})


@pytest.mark.parametrize("check", [prepare, check_node])
@pytest.mark.parametrize("is_option", [False, True])
def test_variables_of_the_shell_and_of_options_are_looked_at(monkeypatch, check, is_option):
    monkeypatch.setattr(node, "probe_nics", lambda: NICS)
    if not is_option:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    option = (("GLOO_SOCKET_IFNAME", "lo"),) if is_option else ()
    with pytest.raises(PenstockError, match="GLOO_SOCKET_IFNAME is set to interfaces other than"):
        check(make_spec(networks=("net1",), environment=option))


def test_a_folder_that_the_node_does_not_see_is_named(tmp_path):
    check_storage([str(tmp_path)])
    with pytest.raises(PenstockError, match=r"does not exist on this node.*nowhere"):
        check_storage([str(tmp_path / "nowhere")])


def test_secrets_are_read_where_they_are(tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    monkeypatch.setenv("HERE", "value")
    secrets = [Secret(name="A", source=f"file:{key}"), Secret(name="B", source="env:HERE")]
    assert secret_values(secrets) == {"A": "s3cret", "B": "value"}


@pytest.mark.parametrize("source", ["env:NOWHERE_AT_ALL", "file:/nowhere/at/all"])
def test_a_secret_that_is_not_there_is_named(source):
    with pytest.raises(UsageError, match="holds the secret KEY"):
        secret_values([Secret(name="KEY", source=source)])
