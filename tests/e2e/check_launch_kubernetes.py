"""A long run in pods of which one is lost: `make soak PART=cluster`."""

import pytest

from tests.e2e.conftest import audit_of_pods
from tests.e2e.test_launch_kubernetes import kubernetes as kubernetes
from tests.e2e.test_launch_kubernetes import launch as launch
from tests.e2e.test_launch_kubernetes import pods_of, state
from tests.kubernetes import JOBSET
from tests.launched import newest_step, wait_until
from tests.warm import penstock

LONG = 400


@pytest.mark.timeout(600)
def test_a_lost_pod_is_replaced_and_every_sample_is_trained_on_once(kubernetes, launch, tmp_path):
    found, _, runs = kubernetes
    shown = launch("lost-pod", "--nodes", 2, "--dry-run")
    assert "would take 3 objects" in shown.stdout, shown.stdout[-800:] + shown.stderr
    assert found.get("JobSet", "lost-pod", api=JOBSET) is None

    done = launch("lost-pod", "--nodes", 2, steps=LONG)
    assert done.returncode == 0, done.stderr
    assert "submitted lost-pod" in done.stdout
    wait_until(lambda: newest_step(runs / "lost-pod") >= 8, "step 8")
    lost = next(pod for pod in pods_of(found, "lost-pod") if pod["metadata"]["generateName"].endswith("-1-"))
    found.delete("Pod", lost["metadata"]["name"], grace_s=0)
    again = launch("lost-pod", "--nodes", 2)
    assert (again.returncode, "is in use by job lost-pod" in " ".join(again.stderr.split())) == (1, True)

    wait_until(lambda: newest_step(runs / "lost-pod") >= LONG, "the last step")
    wait_until(lambda: not state("lost-pod", tmp_path)["is_live"], "the end of the run")
    ended = state("lost-pod", tmp_path)
    assert ended["status"] == "COMPLETED", ended
    accounts = audit_of_pods(runs / "lost-pod")
    assert (accounts["samples"], accounts["faults"]) == (LONG * 12, [])
    printed = penstock("launch", "logs", "lost-pod", "--rank", 1, cwd=tmp_path)
    assert "rank 1 of 2" in printed.stdout, printed.stderr
    owners = found.get("ConfigMap", "lost-pod")["metadata"]["ownerReferences"]
    assert [owner["kind"] for owner in owners] == ["JobSet"]
