"""Our network attachment definitions by the real CNI plugins: cards in pods, their check and preflight."""

import json
import subprocess
from contextlib import ExitStack

import pytest
from tests.pods import pods_on, why_no_pods

from penstock.core.errors import PenstockError
from penstock.core.network.probe import probe_nics
from penstock.doctor import pair
from penstock.doctor import run_checks as examining
from penstock.doctor.checks import interfaces
from penstock.doctor.checks.check import CheckOptions
from penstock.doctor.report import as_json
from penstock.launch.pod_networks import PodNetwork, declared
from penstock.launch.pods.check import check_networks
from penstock.netlab.hosts import lab
from penstock.netlab.topology import Link

pytestmark = pytest.mark.skipif(bool(why_no_pods()), reason=why_no_pods())


def cards(kind="macvlan", **keys):
    return [
        PodNetwork(**{"master": f"eth{rail}", "type": kind, "subnet": f"10.88.{rail}.0/24", **keys})
        for rail in range(2)
    ]


def values(settings):
    return {setting.name: setting.value for setting in settings}


@pytest.mark.parametrize("kind", ["macvlan", "host-device"])
def test_two_pods_get_two_cards_each_with_the_mtu_and_the_variables_of_both(kind, tmp_path):
    networks = cards(kind, mtu=1400)
    with lab(hosts=2, nics=2) as hosts, pods_on(hosts, networks, tmp_path) as pods:
        for pod in pods:
            with pod.inside():
                present = probe_nics()
            settings = values(check_networks(declared("nad", networks), present))
            assert settings["GLOO_SOCKET_IFNAME"] == "net1,net2"
            assert settings["NCCL_SOCKET_IFNAME"] == "=net1,net2"
            assert {nic.name: nic.mtu for nic in present} == {"net1": 1400, "net2": 1400}
            assert pod.run("sysctl", "-n", "net.ipv4.conf.net1.arp_ignore").strip() == "1"
        addresses = {address for pod in pods for found in pod.addresses.values() for address in found}
        assert len(addresses) == 4


def test_a_pod_whose_card_did_not_come_stops_and_never_uses_another(tmp_path):
    networks = cards()
    with lab(hosts=1, nics=2) as hosts, pods_on(hosts, networks[:1], tmp_path) as (pod,), pod.inside():
        present = probe_nics()
    with pytest.raises(PenstockError, match=r"net2 is missing\. Declared: net1 .*, net2 .*\. Present: net1 "):
        check_networks(declared("nad", networks), present)


def test_a_plugin_that_takes_the_cards_route_away_is_noticed(tmp_path):
    """Debian's sbr does, as all before CNI plugins 1.10: gloo would connect by eth0."""
    networks = [
        PodNetwork(master="eth0", subnet="10.88.0.0/24", gateway="10.88.0.1"),
        PodNetwork(master="eth1", subnet="10.88.1.0/24"),
    ]
    with lab(hosts=1, nics=2) as hosts, pods_on(hosts, networks, tmp_path) as (pod,):
        assert "10.88.0.1 dev net1" in pod.run("ip", "route", "show", "table", "100")
        with pod.inside():
            present = probe_nics()
        routes = pod.run("ip", "route")
    if "10.88.0.0/24" in routes:
        pytest.skip("this sbr leaves the card's own route where it is")
    with pytest.raises(PenstockError, match=r"net1 does not carry 10\.88\.0\.0/24"):
        check_networks(declared("nad", networks), present)


def test_preflight_in_pods_names_a_rate_limited_card_and_an_mtu_hole(tmp_path):
    """Three pods: of two, nobody can say which end is at fault."""
    with ExitStack() as stack:
        hosts = stack.enter_context(
            lab(hosts=3, nics=2, rate="40mbit", links={(2, 0): Link(rate="8mbit")}),
        )
        # A bucket of 1,440 bytes lets nothing larger out. The ranks' store is on the other card.
        with hosts.inside(1):
            hole = "tc qdisc replace dev eth1 root tbf rate 40mbit burst 1440 limit 300000"
            subprocess.run(hole.split(), check=True)
        pods = stack.enter_context(pods_on(hosts, cards(), tmp_path))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(examining, "CHECKS", {interfaces.CHECK: interfaces})
        patch.setattr(pair, "_LONG_ENOUGH_S", 0.06)

        def work():
            options = CheckOptions(folder=tmp_path, networks=("net1", "net2"))
            report = examining.examine(options, timeout_s=30.0)
            if report:
                (tmp_path / "report.json").write_text(json.dumps([as_json(report), report.exit_code]))
            return 0

        outcome = pods.run(work)
        assert outcome.code == 0, outcome
    report, code = json.loads((tmp_path / "report.json").read_text())
    named = {(outlier["host"], outlier["card"], outlier["why"]) for outlier in report["outliers"]}
    assert named == {("pod1", "net2", "loses large packets"), ("pod2", "net1", "is slow")}
    assert code == 3
    lost = [
        finding["what"] for finding in report["findings"] if "get lost at net2 of node 1" in finding["what"]
    ]
    assert len(lost) == 1
