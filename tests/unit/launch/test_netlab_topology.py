"""What an emulated network consists of, and the commands that make it."""

import json

import pytest

from penstock.core.errors import UsageError
from penstock.netlab.topology import (
    Link,
    Topology,
    environments,
    forwarding_ports,
    host_commands,
    host_limits,
    hosts_file,
    parse_latency,
    parse_rate,
    switch_commands,
    switch_limits,
    token_bucket,
)


def said(commands: list[list[str]]) -> list[str]:
    return [" ".join(command) for command in commands]


def made(topology: Topology) -> list[str]:
    places = [f"/ns/{host}" for host in range(topology.num_hosts)]
    return said(switch_commands(topology, host_namespaces=places))


@pytest.mark.parametrize("text", ["", "fast", "500", "500mb", "0mbit", "-1gbit", "1 000mbit"])
def test_what_is_no_rate_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(UsageError, match=r"Not a rate of a network .* such as 500mbit"):
        parse_rate(text)


@pytest.mark.parametrize("text", ["", "1", "ms", "-1ms", "1min"])
def test_what_is_no_latency_is_refused_with_one_that_is(text: str) -> None:
    with pytest.raises(UsageError, match=r"Not a latency .* such as 0.5ms"):
        parse_latency(text)


def test_processes_apart_are_each_told_that_they_are_alone() -> None:
    found = environments(Topology(num_hosts=2), processes_per_host=2, num_cores=2, together=False)
    assert [host for host, _ in found] == [0, 0, 1, 1]
    assert {(told["RANK"], told["WORLD_SIZE"], told["LOCAL_WORLD_SIZE"]) for _, told in found} == {
        ("0", "1", "1")
    }


def test_hosts_share_the_cores_of_the_machine_and_have_no_gpu() -> None:
    found = environments(Topology(num_hosts=2), processes_per_host=2, num_cores=16)
    assert {(told["OMP_NUM_THREADS"], told["CUDA_VISIBLE_DEVICES"]) for _, told in found} == {("4", "")}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_hosts": 0}, r"hosts must be from 1 to 200 \(got 0\)"),
        ({"num_hosts": 1, "num_nics": 17}, r"NICs must be from 1 to 16 \(got 17\)"),
        ({"num_hosts": 2, "latency_s": -1.0}, r"latency must not be negative"),
        ({"num_hosts": 101, "num_nics": 4, "latency_s": 0.1}, r"400 NICs in all \(got 404\)"),
        ({"num_hosts": 2, "others": {(2, 0): Link()}}, r"No such \(host, NIC\) \(got \(2, 0\)\)"),
    ],
)
def test_networks_that_cannot_be_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Topology(**wrong)  # type: ignore[arg-type]


def test_an_mtu_that_ipv4_cannot_use_is_refused() -> None:
    with pytest.raises(UsageError, match=r"MTU must be from 576 to 65535 \(got 100\)"):
        Link(mtu=100)


def test_every_nic_of_a_host_hangs_on_a_switch_of_its_own() -> None:
    commands = made(Topology(num_hosts=2, num_nics=2))
    assert [c for c in commands if " master " in c] == [
        "link set port0.0 master rail0",
        "link set port0.1 master rail1",
        "link set port1.0 master rail0",
        "link set port1.1 master rail1",
    ]


def test_a_rate_holds_in_both_directions_of_every_nic() -> None:
    topology = Topology(num_hosts=2, link=Link(rate="1gbit"), others={(1, 0): Link(rate="50mbit")})
    assert [" ".join(c[3:8]) for c in switch_limits(topology)] == [
        "port0.0 root tbf rate 1000000000bit",
        "port1.0 root tbf rate 50000000bit",
    ]
    assert [" ".join(c[3:8]) for c in host_limits(topology, 1)] == ["eth0 root tbf rate 50000000bit"]


def test_no_rate_is_no_limit() -> None:
    topology = Topology(num_hosts=2)
    assert switch_limits(topology) == host_limits(topology, 0) == []


def test_a_token_bucket_holds_two_of_the_largest_packets_at_any_rate() -> None:
    words = token_bucket("eth0", parse_rate("1kbit"))
    assert words[words.index("burst") + 1] == "131072b"


def test_switches_pass_on_the_largest_packet_of_any_host() -> None:
    commands = made(Topology(num_hosts=2, others={(1, 0): Link(mtu=9000)}))
    assert "link add rail0 mtu 9000 type bridge mcast_snooping 0" in commands
    ends = [command.split("mtu ")[1:] for command in commands if "veth" in command]
    assert [(end[0].split()[0], end[1].split()[0]) for end in ends] == [("9000", "1500"), ("9000", "9000")]


def test_an_unplugged_cable_has_no_carrier_and_a_deaf_one_no_switch() -> None:
    others = {(0, 0): Link(cable="unplugged"), (1, 0): Link(cable="deaf")}
    commands = made(Topology(num_hosts=2, others=others))
    assert not [c for c in commands if c.startswith("link set port0.0")]
    assert [c for c in commands if c.startswith("link set port1.0")] == [
        "link set port1.0 up addrgenmode none"
    ]


def test_the_first_nic_carries_the_default_route() -> None:
    commands = said(host_commands(Topology(num_hosts=2, num_nics=2), 1))
    assert commands[-1] == "route add default dev eth0"
    assert "address add 10.77.1.2/24 dev eth1" in commands


def test_every_address_has_a_name_so_that_nobody_waits_for_a_name_server() -> None:
    names = dict(line.split() for line in hosts_file(Topology(num_hosts=2, num_nics=2)).splitlines())
    assert names["10.77.0.2"] == names["::ffff:10.77.0.2"] == "host1"
    assert names["10.77.1.1"] == "host0-eth1"


def test_a_port_is_open_once_its_bridge_says_so() -> None:
    def port(name: str, state: str) -> dict[str, object]:
        return {
            "ifname": name,
            "linkinfo": {"info_slave_kind": "bridge", "info_slave_data": {"state": state}},
        }

    shown = json.dumps([port("port0.0", "forwarding"), port("port1.0", "disabled"), {}])
    assert forwarding_ports(shown) == {"port0.0"}
    assert forwarding_ports("") == set()
