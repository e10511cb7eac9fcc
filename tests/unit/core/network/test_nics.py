from penstock.core.network.nics import Nic, sharing_a_network, usable


def nic(name: str = "eth0", **over: object) -> Nic:
    settings = {"is_up": True, "mtu": 1500, "addresses": ("10.0.0.2/24",), "driver": "mlx5_core", **over}
    return Nic(name=name, **settings)


def test_an_interface_that_is_down_or_without_address_or_leads_to_containers_is_not_used() -> None:
    idle = [nic(is_up=False), nic(addresses=()), nic(driver="bridge"), nic(driver="tun")]
    assert usable(idle) == []


def test_an_address_that_reaches_no_further_than_the_cable_is_none() -> None:
    assert usable([nic(addresses=("169.254.3.1/16", "fe80::1/64"))]) == []


def test_the_network_for_managing_the_machine_is_left_alone() -> None:
    fast = [nic(f"ens{i}", speed_mbit_s=100_000) for i in (2, 1)]
    assert [found.name for found in usable([nic("eno1", speed_mbit_s=1000), *fast])] == ["ens1", "ens2"]


def test_a_speed_that_is_unknown_or_made_up_speaks_neither_for_nor_against() -> None:
    pair = [nic("eth0", driver="veth", speed_mbit_s=10_000), nic("eth1", driver="virtio_net")]
    assert usable(pair) == pair
    assert not pair[0].has_true_speed


def test_a_pod_behind_a_virtual_cable_has_a_network() -> None:
    assert usable([nic(driver="veth", speed_mbit_s=10_000)])


def test_interfaces_of_networks_of_their_own_share_none() -> None:
    assert sharing_a_network([nic("eth0"), nic("eth1", addresses=("10.0.1.2/24",))]) == []


def test_its_address_is_one_that_others_reach() -> None:
    assert nic(addresses=("169.254.3.1/16", "fd00::2/64")).address == "fd00::2"
    assert nic(addresses=()).address == ""


def test_a_bridge_over_the_card_carries_the_run_if_it_has_the_default_route() -> None:
    assert usable([nic("br0", driver="bridge", carries_default_route=True)])
