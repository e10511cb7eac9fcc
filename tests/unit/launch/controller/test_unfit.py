"""What a pod that failed its checks says of nodes."""

import pytest

from penstock.launch.controller.reconcile import _slow_nodes, _unfit
from penstock.launch.pods.preflight import SLOW_NODE

COMPLAINT = """\
a library's warning
penstock: A folder of the run does not exist on this node (got '/runs/corpus'). Mount the file
system that holds it on every node, or give another path in the recipe.
"""


def ended(code, message):
    return {"containerStatuses": [{"state": {"terminated": {"exitCode": code, "message": message}}}]}


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            ended(77, COMPLAINT),
            "A folder of the run does not exist on this node (got '/runs/corpus'). Mount the file system "
            "that holds it on every node, or give another path in the recipe.",
        ),
        (ended(77, ""), "its preflight failed; see the pod's log"),
        (ended(1, COMPLAINT), ""),
        ({}, ""),
    ],
)
def test_its_paragraph_is_one_line_without_what_was_printed_before(status, said):
    assert _unfit(status) == said


def test_nodes_to_leave_out_are_those_of_a_preflight_that_failed_each_with_its_reason():
    said = f"a report\n{SLOW_NODE}n1: eth0: is slow\n{SLOW_NODE}n2: \n{COMPLAINT}"
    assert _slow_nodes(ended(2, said)) == {"n1": "eth0: is slow", "n2": ""}
    assert _slow_nodes(ended(0, said)) == _slow_nodes(ended(2, COMPLAINT)) == _slow_nodes({}) == {}
