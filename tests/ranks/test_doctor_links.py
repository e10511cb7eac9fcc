"""`penstock doctor` in emulated networks: a slow NIC, a wrong MTU, a dead link are each found and named."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from penstock.doctor import collective, packet_loss, pair
from penstock.doctor import run_checks as examining
from penstock.doctor.checks import interfaces
from penstock.doctor.checks.check import CheckOptions
from penstock.doctor.report import as_json
from penstock.launch.local import run as run_here
from penstock.netlab import switch
from penstock.netlab.hosts import Hosts, lab, why_not
from penstock.netlab.topology import Link, mac_of

TIMEOUT_S = 30.0  # of what arrives at once or never; many tests may share the machine
OPTIONS: dict[str, float] = {}
needs_hosts = pytest.mark.skipif(bool(why_not()), reason=why_not())

Report = dict[str, Any]


@contextmanager
def briefly() -> Iterator[None]:
    """Leave out the checks of one machine, which have tests of their own; send little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examining, "CHECKS", {interfaces.CHECK: interfaces})
        patch.setattr(pair, "_LONG_ENOUGH_S", 0.03)  # the faults here are gross
        patch.setattr(pair, "_CONNECT_S", 2.0)  # the kernel answers at once, or nothing does
        patch.setattr(packet_loss, "_LONG_ENOUGH_S", 0.02)  # 200 packets suffice
        patch.setattr(collective, "_SECONDS", 0.05)
        yield


def examined(hosts: Hosts, folder: Path) -> dict[int, Report]:
    """Examine from a rank on each host; return the reports that came of it, by rank."""

    def work() -> int:
        report = examining.examine(CheckOptions(folder=folder, **OPTIONS), timeout_s=TIMEOUT_S)
        if report:
            (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(as_json(report)))
        return 0

    with briefly():
        outcome = hosts.run(work)
    assert outcome.code == 0, outcome
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def lines(report: Report, *levels: str) -> list[str]:
    return [finding["what"] for finding in report["findings"] if finding["level"] in levels]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What is said of three hosts on three networks, with a fault in each network."""
    faults = {
        (2, 0): Link(rate="30mbit", mtu=1400),
        (1, 1): Link(rate="6mbit"),
        (2, 2): Link(rate="30mbit", cable="deaf"),
    }
    with lab(hosts=3, nics=3, rate="30mbit", links=faults) as hosts:
        reports = examined(hosts, tmp_path_factory.mktemp("report"))
    assert list(reports) == [0]  # the first rank speaks for all
    return reports[0]


@needs_hosts
def test_a_slow_nic_is_found_and_named(report: Report) -> None:
    assert any("eth1 of node 1: " in line and "Mbit/s from node" in line for line in lines(report, "red"))


@needs_hosts
def test_a_wrong_mtu_is_found_and_named(report: Report) -> None:
    assert any("eth0 of node 2 has an MTU of 1,400" in line for line in lines(report, "yellow"))


@needs_hosts
def test_a_dead_link_is_found_and_named_and_holds_up_no_other(report: Report) -> None:
    dead = [line for line in lines(report, "red") if "Nothing passes" in line]
    assert dead == ["Nothing passes to or from eth2 of node 2"]
    alive = {
        (link["source"], link["target"], link["source_nic"]) for link in report["links"] if link["gbit_s"]
    }
    assert len(alive) == 18 - 4
    assert report["level"] == "red"


@needs_hosts
def test_every_direction_between_hosts_is_measured(report: Report) -> None:
    assert len(report["links"]) == 18
    sound = [link for link in report["links"] if link["source_nic"] == "eth1"]
    assert all(link["round_trip_s"] > 0 and link["arriving_bytes"] == 1500 for link in sound)
    assert [node["host"] for node in report["nodes"]] == ["host0", "host1", "host2"]


@needs_hosts
def test_a_switch_that_drops_large_packets_is_found(tmp_path: Path) -> None:
    with lab(hosts=2, rate="40mbit", mtu=1400) as hosts:
        for host in range(2):
            with hosts.inside(host):  # the switch goes on taking 1,400
                subprocess.run(["ip", "link", "set", "eth0", "mtu", "1500"], check=True)
        said = lines(examined(hosts, tmp_path)[0], "red")
    (lost,) = [line for line in said if "get lost" in line]
    assert "Packets of 1,500 bytes" in lost
    assert "up to 1,400 arrive" in lost


@needs_hosts
def test_a_host_that_is_cut_off_is_missed_by_the_others_and_says_so_itself(tmp_path: Path) -> None:
    with lab(hosts=2, links={(1, 0): Link(cable="deaf")}) as hosts, pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "TIMEOUT_S", 5.0)  # nothing will come
        reports = examined(hosts, tmp_path)
    assert lines(reports[0], "red") == ["Node 1 did not come"]
    (alone,) = lines(reports[1], "red")
    assert alone.startswith("Rank 1 does not reach the first rank at ")


def dropping(receivers, shares: dict[int, float]):
    """Let an emulated switch lose a share of the frames of some hosts."""
    random = Random(7)
    lost = {bytes.fromhex(mac_of(host, 0).replace(":", "")): share for host, share in shares.items()}

    def lossy(frame, source, cables):
        to = receivers(frame, source, cables)
        comes_from = frame[switch.HEADER_BYTES + 6 : switch.HEADER_BYTES + 12]
        return [] if len(frame) > 200 and random.random() < lost.get(comes_from, 0.0) else to

    return lossy


@needs_hosts
def test_cards_that_lose_5_and_20_percent_of_packets_are_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(switch, "_receivers", dropping(switch._receivers, {1: 0.2, 2: 0.05}))
    monkeypatch.setattr(pair, "_FIRST_BYTES", 2**16)  # each loss may hold up a transfer for 0.2 s
    with lab(hosts=4, rate="100mbit", latency_s=1e-4) as hosts:
        for host in range(4):
            with hosts.inside(host):  # a frame is a packet, as on a wire, not a burst
                subprocess.run(["ip", "link", "set", "eth0", "gso_max_segs", "1"], check=True)
        said = lines(examined(hosts, tmp_path)[0], "red")
    lossy = [line for line in said if "of packets get lost" in line]
    assert [line.partition(":")[0] for line in lossy] == ["eth0 of node 1", "eth0 of node 2"]


@needs_hosts
def test_a_dead_card_has_a_name_and_unmeasured_pairs_are_told_when_the_time_is_short(tmp_path: Path) -> None:
    faults = {(1, 1): Link(rate="40mbit", cable="deaf")}
    with lab(hosts=4, nics=2, rate="40mbit", links=faults) as hosts, pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "OPTIONS", {"links_s": 0.01})
        report = examined(hosts, tmp_path)[0]
    assert [line for line in lines(report, "red") if "Nothing passes" in line] == [
        "Nothing passes to or from eth1 of node 1"
    ]
    assert any("were not measured, because the time ran out" in line for line in lines(report, "yellow"))
    assert [outlier["node"] for outlier in report["outliers"]] == [1]


def test_processes_of_one_machine_are_measured_over_its_loopback(tmp_path: Path) -> None:
    def work() -> int:
        report = examining.examine(CheckOptions(folder=tmp_path), timeout_s=TIMEOUT_S)
        assert (report is None) == (os.environ["RANK"] != "0")
        if report:
            (tmp_path / "report.json").write_text(json.dumps(as_json(report)))
        return 0

    with briefly():
        outcome = run_here(work, lambda error: (repr(error), 1), processes=2)
    assert outcome.code == 0, outcome
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["links"]) == 2
    assert all(link["gbit_s"] > 0 and link["source_nic"] == "lo" for link in report["links"])
    assert len(report["nodes"]) == 1
    assert any("added up over 2" in line for line in lines(report, "green"))
