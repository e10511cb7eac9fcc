"""What a pod was promised against what it has: a difference ends the start, and names both."""

from dataclasses import replace

import pytest

from penstock.core.errors import PenstockError
from penstock.core.network.nics import Nic
from penstock.launch.pod_networks import PodNetwork, declared
from penstock.launch.pods.check import check_networks

ETH0 = Nic(name="eth0", is_up=True, mtu=1450, addresses=("10.244.0.9/24",), carries_default_route=True)
NET1 = Nic(name="net1", is_up=True, mtu=9000, addresses=("10.1.0.4/24",), driver="macvlan")
NET2 = replace(NET1, name="net2", addresses=("10.2.0.4/24",))
DECLARED = declared(
    "nad",
    [PodNetwork(master=f"ens{number}", mtu=9000, subnet=f"10.{number}.0.0/24") for number in (1, 2)],
)


def values(settings):
    return {setting.name: setting.value for setting in settings}


def test_the_variables_name_the_cards_and_not_the_clusters_own_network():
    found = values(check_networks(DECLARED, [ETH0, NET1, NET2]))
    assert found["GLOO_SOCKET_IFNAME"] == "net1,net2"
    assert found["NCCL_SOCKET_IFNAME"] == "=net1,net2"
    assert found["NCCL_MIN_NCHANNELS"] == "4"


@pytest.mark.parametrize(
    ("present", "fault"),
    [
        ([ETH0, NET1], "net2 is missing"),
        ([ETH0, NET1, replace(NET2, is_up=False)], "net2 is down"),
        ([ETH0, NET1, replace(NET2, addresses=())], "net2 has no address"),
        ([ETH0, NET1, replace(NET2, addresses=("10.3.0.4/24",))], "net2 has no address in 10.2.0.0/24"),
        ([ETH0, NET1, replace(NET2, mtu=1500)], "net2 has an MTU of 1500, not 9000"),
        ([ETH0, NET1, replace(NET2, carries_own_network=False)], "net2 does not carry 10.2.0.0/24"),
        (
            [ETH0, replace(NET1, speed_mbit_s=100_000), replace(NET2, speed_mbit_s=10_000)],
            "net2 is less than half as fast as another",
        ),
    ],
)
def test_a_difference_stops_the_run_with_both_lists(present, fault):
    with pytest.raises(PenstockError) as caught:
        check_networks(DECLARED, present)
    message = str(caught.value)
    assert f"This pod does not have its networks: {fault}" in message
    assert "Declared: net1 (in 10.1.0.0/24, MTU 9000), net2 (in 10.2.0.0/24, MTU 9000)" in message
    assert "Present: eth0 (10.244.0.9/24, MTU 1450), net1 (10.1.0.4/24, MTU 9000)" in message


def test_a_variable_of_the_image_that_names_other_interfaces_is_refused():
    with pytest.raises(PenstockError, match=r"NCCL_SOCKET_IFNAME is set to .* \(got 'eth0'\)"):
        check_networks(DECLARED, [ETH0, NET1, NET2], {"NCCL_SOCKET_IFNAME": "eth0"})
    check_networks(DECLARED, [ETH0, NET1, NET2], {"NCCL_SOCKET_IFNAME": "=net2,net1"})


def test_a_pod_of_which_nothing_was_declared_uses_what_it_has():
    assert values(check_networks((), [ETH0]))["GLOO_SOCKET_IFNAME"] == "eth0"
