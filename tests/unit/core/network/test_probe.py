import socket
import sys

import pytest

from penstock.core.network.probe import default_routes, ipv6_addresses, probe_nics

ROUTE = """\
Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
ens2	00000000	010200C0	0003	0	0	0	00000000	0	0	0
ens3	000200C0	00000000	0001	0	0	0	00FFFFFF	0	0	0
"""
IPV6_ROUTE = """\
fd000000000000000000000000000000 40 {0} 00 {0} 00000100 00000001 00000000 00000001     ens3
00000000000000000000000000000000 00 {0} 00 {0} 00000400 00000003 00000000 00000003     ens4
00000000000000000000000000000000 00 {0} 00 {0} ffffffff 00000001 00000000 00200200       lo
""".format("0" * 32)


def test_default_routes_of_both_protocols_are_found() -> None:
    assert default_routes(ROUTE, IPV6_ROUTE) == {"ens2", "ens4"}


def test_a_machine_without_routes_or_ipv6_has_none() -> None:
    assert default_routes("", "") == set()
    assert ipv6_addresses("") == {}


def test_ipv6_addresses_are_read_by_interface() -> None:
    text = "00000000000000000000000000000001 01 80 10 80       lo\n"
    text += "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
    assert ipv6_addresses(text) == {"lo": ["::1/128"], "eth0": ["fe80::fc:ff:fe00:1/64"]}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux answers these questions")
def test_every_interface_of_this_machine_but_the_loopback_is_found() -> None:
    names = {name for _, name in socket.if_nameindex()}
    found = probe_nics()
    assert {nic.name for nic in found} == names - {"lo"}
    assert all(nic.mtu > 0 for nic in found)


def test_other_systems_have_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert probe_nics() == []
