"""The doctor's command before a run, and what is read of its files."""

from penstock.doctor.link_metrics import metrics_text
from penstock.doctor.outliers import Outlier
from penstock.launch.pod import PodSpec
from penstock.launch.pod_networks import PodNetwork
from penstock.launch.preflight import command_of, reasons_of
from tests.unit.launch.test_spec import make_spec


def networks_in(command):
    return [word.removeprefix("--network=") for word in command if word.startswith("--network=")]


def test_the_doctor_measures_the_networks_of_the_run_and_says_what_to_leave_out():
    command = command_of(make_spec(networks=("ens1", "ens2")))
    assert networks_in(command) == ["ens1", "ens2"]
    assert {
        "--exclude=/data/runs/first/launch/exclude.txt",
        "--metrics=/data/runs/first/launch/links.prom",
    } <= set(command)


def test_in_pods_it_measures_the_cards_that_were_declared():
    cards = tuple(PodNetwork(master=f"ens{n}", subnet=f"10.{n}.0.0/24") for n in (1, 2))
    command = command_of(make_spec(pod=PodSpec(image="registry/penstock:0.1", networks=cards)))
    assert networks_in(command) == ["net1", "net2"]


def test_the_reasons_are_read_from_what_the_doctor_writes():
    def outlier(node, host, card, why):
        return Outlier(node=node, host=host, card=card, why=why)

    outliers = [
        outlier(1, "n1", "net1", "is slow"),
        outlier(1, "n1", "net2", "loses large packets"),
        outlier(2, "n2", "", 'disk: "/runs" has\n1 MiB free \\'),
        outlier(3, "", "", "did not report"),
    ]
    text = metrics_text([], outliers, {}, seconds=1.0)
    assert reasons_of(text) == {
        "n1": "net1 is slow, net2 loses large packets",
        "n2": 'disk: "/runs" has 1 MiB free \\',
        "3": "did not report",
    }
    assert reasons_of(metrics_text([], [], {}, seconds=1.0)) == {}
