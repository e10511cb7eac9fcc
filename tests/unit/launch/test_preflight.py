"""The doctor's command before a run, and what is read of its files."""

import json
from dataclasses import replace

from penstock.doctor.checks.check import red
from penstock.doctor.report import DoctorReport, as_json
from penstock.launch.pod_networks import PodNetwork
from penstock.launch.pods.pod import PodSpec
from penstock.launch.preflight import command_of, reasons_of
from tests.unit.launch.test_spec import make_spec


def networks_in(command):
    return [word.removeprefix("--network=") for word in command if word.startswith("--network=")]


def test_the_doctor_measures_the_networks_of_the_run_and_says_what_to_leave_out():
    command = command_of(make_spec(networks=("ens1", "ens2")))
    assert networks_in(command) == ["ens1", "ens2"]
    assert {
        "--exclude=/data/runs/first/launch/exclude.txt",
        "--json=/data/runs/first/launch/doctor.json",
    } <= set(command)


def test_in_pods_it_measures_the_cards_that_were_declared():
    cards = tuple(PodNetwork(master=f"ens{n}", subnet=f"10.{n}.0.0/24") for n in (1, 2))
    command = command_of(make_spec(pod=PodSpec(image="registry/penstock:0.1", networks=cards)))
    assert networks_in(command) == ["net1", "net2"]


def test_the_reasons_are_read_from_what_the_doctor_writes():
    def red_line(node, what):
        return replace(red(what, remedy="Mend it.", check="disk"), nodes=(node,))

    report = DoctorReport(
        hosts={0: "n0", 1: "n1", 2: "n2"},
        num_nodes=4,
        findings=[red_line(1, '"/runs" has\n1 MiB free \\'), red_line(1, "slow"), red_line(2, "full")],
        facts={},
        links=[],
        num_local=1,
        seconds=1.0,
    )
    assert reasons_of(json.loads(json.dumps(as_json(report)))) == {
        "n1": 'disk: "/runs" has 1 MiB free \\, disk: slow',
        "n2": "disk: full",
        "3": "did not report",
    }
    assert reasons_of(as_json(replace(report, findings=[], num_nodes=1))) == {}
