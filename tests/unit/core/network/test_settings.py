from dataclasses import replace

import pytest

from penstock.core.network.nics import Nic
from penstock.core.network.settings import Setting, gloo_settings, nccl_settings

FAST = Nic(
    name="ens1",
    is_up=True,
    mtu=9000,
    addresses=("10.0.0.2/24",),
    speed_mbit_s=100_000,
    driver="mlx5_core",
)
PAIR = [FAST, replace(FAST, name="ens2", addresses=("10.0.1.2/24",))]


def values(settings: list[Setting]) -> dict[str, str]:
    return {setting.name: setting.value for setting in settings}


def test_gloo_is_told_every_interface() -> None:
    assert values(gloo_settings(PAIR)) == {"GLOO_SOCKET_IFNAME": "ens1,ens2"}


def test_two_fast_interfaces_without_rdma_get_streams_and_channels() -> None:
    assert values(nccl_settings(PAIR)) == {
        "NCCL_SOCKET_IFNAME": "=ens1,ens2",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "3",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_CROSS_NIC": "0",
    }


@pytest.mark.parametrize("speed", [1000, 10_000, 25_000, 40_000, 100_000, 400_000, 800_000])
def test_streams_carry_the_speed_within_what_nccl_allows(speed: int) -> None:
    found = values(nccl_settings([replace(FAST, speed_mbit_s=speed)]))
    threads, sockets = int(found.get("NCCL_SOCKET_NTHREADS", 1)), int(found.get("NCCL_NSOCKS_PERTHREAD", 1))
    assert threads <= 16
    assert threads * sockets <= 64
    assert threads * sockets * 10_000 >= min(speed, 320_000)


def test_an_rdma_device_is_used_and_sockets_are_left_alone() -> None:
    found = values(nccl_settings([replace(FAST, rdma_devices=("mlx5_0",))]))
    assert found == {"NCCL_SOCKET_IFNAME": "=ens1", "NCCL_IB_HCA": "=mlx5_0"}


def test_a_made_up_speed_asks_for_no_streams() -> None:
    virtual = replace(FAST, driver="veth", speed_mbit_s=100_000)
    assert "NCCL_SOCKET_NTHREADS" not in values(nccl_settings([virtual]))


def test_a_machine_without_a_network_is_told_nothing() -> None:
    assert gloo_settings([]) == nccl_settings([]) == []


def test_every_setting_says_its_reason() -> None:
    assert all(setting.reason for setting in gloo_settings(PAIR) + nccl_settings(PAIR))
