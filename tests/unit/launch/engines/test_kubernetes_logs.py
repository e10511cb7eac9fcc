"""Logs of a run's pods, also of those that start later, and what the first pod prints of the run."""

from threading import Event

import pytest

from penstock.core.errors import PenstockError
from penstock.launch.engines import kubernetes_logs
from penstock.launch.engines.kubernetes_logs import PodsStarted, followed
from penstock.launch.pod_node import PROGRESS

PATIENCE_S = 60.0


class Pods:
    """Pods of a job: what each prints, each time that it is read, and which have started at each look."""

    def __init__(self, *looks, **printed):
        self.looks, self.printed = list(looks), {name: list(reads) for name, reads in printed.items()}

    def look(self):
        is_over = len(self.looks) == 1
        names = self.looks[0] if is_over else self.looks.pop(0)
        return PodsStarted(names={f"uid-{name}": name for name in names}, is_over=is_over)

    def read(self, name):
        yield from self.printed[name].pop(0)

    def lines(self):
        return followed(self.look, self.read, pause_s=0.01)


def test_pods_that_start_later_are_followed_until_the_job_is_over():
    pods = Pods([], ["a"], ["a", "b"], ["a", "b", "c"], a=[["a1", "a2"]], b=[["b1"]], c=[["c1"]])
    assert sorted(pods.lines()) == ["a1", "a2", "b1", "c1"], "each once"


def test_a_pod_whose_container_had_not_started_is_read_again():
    pods = Pods(*[["a"]] * 100, a=[[]] * 3 + [["a1"]] + [[]] * 100)
    assert next(pods.lines()) == "a1"


def test_a_pod_that_prints_nothing_holds_up_no_other():
    ends = Event()

    def silent():
        ends.wait(PATIENCE_S)
        yield "late"

    lines = Pods(["quiet", "loud"], ["quiet", "loud"], quiet=[silent()], loud=[["a", "b"]]).lines()
    assert [next(lines), next(lines)] == ["a", "b"]
    ends.set()
    assert list(lines) == ["late"]


def test_a_log_that_stays_open_after_the_end_of_its_job_is_left(monkeypatch):
    monkeypatch.setattr(kubernetes_logs, "_LAST_LINES_S", 0.1)
    ends = Event()

    def open_for_ever():
        yield "a"
        ends.wait(PATIENCE_S)

    assert list(Pods(["lost"], lost=[open_for_ever()]).lines()) == ["a"]
    ends.set()


def test_a_log_that_breaks_off_is_told():
    def broken():
        yield "a"
        raise PenstockError("the cluster is gone")

    lines = Pods(["a"], a=[broken()]).lines()
    assert next(lines) == "a"
    with pytest.raises(PenstockError, match="the cluster is gone"):
        next(lines)


def test_lines_of_the_first_pod_that_are_cut_or_of_another_kind_tell_nothing():
    lines = ['[progress] {"step": 1}\n', '[progress] {"st', "[progress] 3\n", '[rank 0] {"step": 2}\n', "\n"]
    assert kubernetes_logs._printed(lines, PROGRESS) == [{"step": 1}]
