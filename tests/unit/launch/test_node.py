"""What a node checks before its ranks start."""

import pytest

from penstock.core.errors import PenstockError, UsageError
from penstock.launch.nics import Nic
from penstock.launch.node import check_storage, network_variables, secret_values
from penstock.launch.spec import Secret

NICS = [
    Nic(name="eth0", is_up=True, mtu=1500, addresses=("192.168.0.2/24",), carries_default_route=True),
    Nic(name="net1", is_up=True, mtu=9000, addresses=("10.0.1.2/24",)),
    Nic(name="net2", is_up=True, mtu=9000, addresses=("10.0.2.2/24",)),
    Nic(name="net3", is_up=False, mtu=9000, addresses=("10.0.3.2/24",)),
]


def test_named_networks_carry_the_run_and_no_other():
    found = network_variables(("net1", "net2"), NICS)
    assert found["GLOO_SOCKET_IFNAME"] == "net1,net2"
    assert found["NCCL_SOCKET_IFNAME"] == "=net1,net2"
    assert found["NCCL_IB_DISABLE"] == "1"


@pytest.mark.parametrize("missing", ["net3", "net9"])
def test_a_missing_network_stops_the_node_with_both_lists(missing):
    with pytest.raises(PenstockError, match="No other interface is used instead") as caught:
        network_variables(("net1", missing), NICS)
    assert f"{missing} of net1, {missing}; up are eth0, net1, net2" in str(caught.value)


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
