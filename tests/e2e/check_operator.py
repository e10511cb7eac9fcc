"""Runs of the operator that lose nodes, get them back, and leave out bad ones: `make soak PART=cluster`."""

from functools import partial

import pytest

from penstock.launch.preflight import EXIT_OUTLIERS
from penstock.netlab.hosts import lab, why_not
from penstock.netlab.topology import Link, address_of
from tests.e2e.conftest import audit_of_pods
from tests.e2e.test_operator import kubernetes as kubernetes
from tests.e2e.test_operator import leaves_no_process as leaves_no_process
from tests.kubelet import NodeNetwork
from tests.launched import events_of, starts_of


@pytest.mark.timeout(900)
def test_an_elastic_run_shrinks_without_a_lost_node_grows_again_and_leaves_out_an_unfit_one(
    kubernetes, corpus
):
    run = kubernetes.runs / "elastic"
    kubernetes.start("elastic", corpus, nodes="1:2", port=9403)
    kubernetes.until_trains_on("elastic", 2)

    lost, seen = kubernetes.node_of("elastic", 1), len(starts_of(run))
    kubernetes.lose_node(lost)
    kubernetes.until_trains_on("elastic", 1, since=seen)
    kubernetes.until(lambda: kubernetes.status("elastic").get("nodes") == 1, "one node told")
    seen = len(starts_of(run))
    kubernetes.room.add(lost)
    kubernetes.until_trains_on("elastic", 2, since=seen)

    # The node of the first pod, which holds the rendezvous: it gets the other's, which the operator may free.
    lost, seen = kubernetes.node_of("elastic", 0), len(starts_of(run))
    kubernetes.lose_node(lost)
    kubernetes.until_trains_on("elastic", 1, since=seen)
    assert kubernetes.status("elastic")["starts"] == 1, "the same job all the time"
    assert 1 not in [event.get("code") for event in events_of(run)], "it left, and did not fail"

    # It comes back without the run's volume.
    seen = len(starts_of(run))
    kubernetes.room.add(lost, sees_claims=False)
    kubernetes.until(lambda: kubernetes.status("elastic").get("excludedNodes") == [lost], "an exclusion")
    kubernetes.until_trains_on("elastic", 1, since=seen)
    (why,) = [message for reason, message in kubernetes.events("elastic") if reason == "NodeExcluded"]
    assert why.startswith(f"node {lost}: A folder of the run does not exist on this node (got '/runs/"), why
    assert kubernetes.status("elastic")["starts"] == 2

    kubernetes.delete("elastic")
    kubernetes.until(lambda: kubernetes.run("elastic") is None, "the end")
    kubernetes.lose_node(lost)
    kubernetes.room.add(lost)
    accounts = audit_of_pods(run)
    assert (accounts["samples"], accounts["faults"]) == (accounts["steps"] * 12, [])
    assert set(accounts["ranks"]) == {1, 2}


@pytest.fixture
def with_cards(kubernetes):
    """Names of four more nodes, whose cards are on one network; that of the second is five times as slow.

    They have the label `cards=emulated`. The scheduler takes the last one only where no other is free.
    """
    if reason := why_not():
        pytest.skip(f"NO EMULATED HOSTS: {reason}; no card was slow")
    names = ["c1", "c2", "c3", "c4"]
    with lab(hosts=len(names), rate="40mbit", links={(1, 0): Link(rate="8mbit")}) as hosts:
        try:
            for host, name in enumerate(names):
                network = NodeNetwork(partial(hosts.inside, host), address_of(host, 0))
                kubernetes.room.add(name, network=network, labels={"cards": "emulated"})
            taints = [{"key": "spare", "effect": "PreferNoSchedule"}]
            assert kubernetes.cluster.patch("Node", names[-1], {"spec": {"taints": taints}})[0] == 200
            yield names
        finally:
            for name in names:
                kubernetes.lose_node(name)


@pytest.mark.timeout(900)
def test_a_run_whose_preflight_finds_a_slow_card_trains_on_the_other_nodes(kubernetes, with_cards, corpus):
    run, (_, slow, *_) = kubernetes.runs / "sound", with_cards
    selector = {"cards": "emulated"}
    kubernetes.start("sound", corpus, nodes=3, steps=20, port=9404, doctor="require", nodeSelector=selector)
    kubernetes.until(lambda: len(kubernetes.nodes_of("sound")) == 3, "three pods on nodes")
    assert slow in kubernetes.nodes_of("sound"), "of the first start"
    kubernetes.until(lambda: kubernetes.status("sound").get("excludedNodes"), "an exclusion", patience_s=240)
    assert not starts_of(run), "it has not trained"

    ends = ("Succeeded", "Failed")
    kubernetes.until(lambda: kubernetes.status("sound")["phase"] in ends, "the end", patience_s=240)
    status, told = kubernetes.status("sound"), kubernetes.events("sound")
    assert status["phase"] == "Succeeded", status
    assert (status["excludedNodes"], status["starts"]) == ([slow], 2)
    assert [message for reason, message in told if reason == "NodeExcluded"] == [
        f"the preflight found 1 node to leave out: {slow} (eth0 is slow)"
    ]
    affinity = kubernetes.pods("sound")[0]["spec"]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": [slow]}]}
    assert kubernetes.nodes_of("sound") == {*with_cards} - {slow}
    assert [event["code"] for event in events_of(run) if event["event"] == "examined"] == [EXIT_OUTLIERS, 0]
    assert starts_of(run) == [(0, 3)]
    accounts = audit_of_pods(run)
    assert (accounts["samples"], accounts["faults"]) == (20 * 12, [])
    kubernetes.delete("sound")
    kubernetes.until(lambda: kubernetes.run("sound") is None, "its deletion")
