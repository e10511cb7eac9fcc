"""Logs of a run's pods, also of those that start later, and what the first pod prints of the run."""

from datetime import UTC, datetime, timedelta
from threading import Event

import pytest

from penstock.core.errors import PenstockError
from penstock.launch.engines import kubernetes_logs
from penstock.launch.engines.engine import EngineUnreachable
from penstock.launch.engines.kubernetes_api import LogBrokeOff, LogLine
from penstock.launch.engines.kubernetes_logs import PodsStarted, followed, started_of
from penstock.launch.pods.node import PROGRESS

PATIENCE_S = 60.0


def printed(*texts):
    """Lines of a log, a second apart."""
    first = datetime(2026, 1, 1, tzinfo=UTC)
    return [LogLine(first + timedelta(seconds=index), text) for index, text in enumerate(texts)]


class Pods:
    """Pods of a job: what each printed by each time that it is read, and which had started at each look.

    They run until the last look, at which the job is over. A log that is read once more is as it was last.
    """

    def __init__(self, *looks, **logs):
        self.looks, self.logs = list(looks), {name: list(reads) for name, reads in logs.items()}

    def look(self):
        is_over = len(self.looks) == 1
        names = {f"uid-{name}": name for name in (self.looks[0] if is_over else self.looks.pop(0))}
        return PodsStarted(names=names, running=() if is_over else names, is_over=is_over)

    def read(self, name):
        reads = self.logs[name]
        yield from reads.pop(0) if len(reads) > 1 else reads[0]

    def lines(self):
        return followed(self.look, self.read, pause_s=0.01)


def test_pods_that_start_later_are_followed_until_the_job_is_over():
    pods = Pods(
        [], ["a"], ["a", "b"], ["a", "b", "c"], a=[printed("a1", "a2")], b=[printed("b1")], c=[printed("c1")]
    )
    assert sorted(pods.lines()) == ["a1", "a2", "b1", "c1"], "each once"


def test_a_pod_whose_container_had_not_started_is_read_again():
    pods = Pods(*[["a"]] * 100, a=[[]] * 3 + [printed("a1")])
    assert next(pods.lines()) == "a1"


def test_a_log_whose_connection_ends_before_its_pod_is_read_on_without_a_line_twice():
    reads = [printed("a1", "a2"), printed("a1", "a2", "a3"), printed("a1", "a2", "a3", "a4")]
    assert list(Pods(*[["a"]] * 100, a=reads).lines()) == ["a1", "a2", "a3", "a4"]


def test_lines_of_one_microsecond_are_printed_once_each_however_connections_end():
    at = datetime(2026, 1, 1, tzinfo=UTC)
    lines = [LogLine(at, text) for text in ("a1", "a2", "a2", "a3")]
    reads = [lines[:1], lines[:3], lines, [*lines, *printed("", "a4")[1:]]]
    assert list(Pods(*[["a"]] * 100, a=reads).lines()) == ["a1", "a2", "a2", "a3", "a4"]


def test_a_pod_whose_node_does_not_answer_is_neither_read_nor_taken_for_ended():
    phases = {"a": "Pending", "b": "Running", "c": "Unknown", "d": "Succeeded", "e": "Failed"}
    pods = [
        {"metadata": {"uid": f"uid-{name}", "name": name}, "status": {"phase": phase}}
        for name, phase in phases.items()
    ]
    found = started_of([*pods, {"metadata": {"uid": "uid-f", "name": "f"}}], is_over=False)
    assert found.names == {"uid-b": "b", "uid-d": "d", "uid-e": "e"}
    assert list(found.running) == ["uid-b"]


def test_a_line_that_a_pod_prints_after_its_connection_has_ended_comes_when_the_job_is_over():
    assert list(Pods(["a"], ["a"], ["a"], a=[printed("a1"), printed("a1", "a2")]).lines()) == ["a1", "a2"]


def test_lines_that_nobody_takes_are_not_read_without_bound(monkeypatch):
    monkeypatch.setattr(kubernetes_logs, "_MAX_WAITING", 3)
    has_read_all = Event()

    def long():
        yield from printed(*map(str, range(1000)))
        has_read_all.set()

    lines = Pods(["a"], a=[long()]).lines()
    assert next(lines) == "0"
    assert not has_read_all.wait(0.2)
    assert list(lines) == [str(number) for number in range(1, 1000)]


def test_a_pod_that_prints_nothing_holds_up_no_other():
    ends = Event()

    def silent():
        ends.wait(PATIENCE_S)
        yield from printed("late")

    loud = printed("a", "b")
    lines = Pods(["quiet", "loud"], ["quiet", "loud"], quiet=[silent(), printed("late")], loud=[loud]).lines()
    assert [next(lines), next(lines)] == ["a", "b"]
    ends.set()
    assert list(lines) == ["late"]


def test_a_log_that_stays_open_after_the_end_of_its_job_is_left(monkeypatch):
    monkeypatch.setattr(kubernetes_logs, "_LAST_LINES_S", 0.1)
    ends = Event()

    def open_for_ever():
        yield from printed("a")
        ends.wait(PATIENCE_S)

    assert list(Pods(["lost"], lost=[open_for_ever()]).lines()) == ["a"]
    ends.set()


def broken_after(*texts):
    yield from printed(*texts)
    raise LogBrokeOff("the log broke off")


def test_a_log_that_breaks_off_while_its_pod_runs_is_read_on():
    reads = [broken_after(), broken_after("a1"), printed("a1", "a2")]
    assert list(Pods(*[["a"]] * 100, a=reads).lines()) == ["a1", "a2"]


def test_a_log_that_breaks_off_when_the_job_is_over_is_told():
    lines = Pods(["a"], a=[broken_after("a1")]).lines()
    assert next(lines) == "a1"
    with pytest.raises(PenstockError, match="the log broke off"):
        next(lines)


class Away:
    """Looks at pods, of which each with a number in `at` is not answered."""

    def __init__(self, pods, at):
        self.pods, self.at, self.num_looks = pods, at, 0

    def __call__(self):
        self.num_looks += 1
        if self.num_looks in self.at:
            raise EngineUnreachable("away")
        return self.pods.look()


def test_a_cluster_that_is_away_for_a_moment_ends_nothing():
    pods = Pods(["a"], ["a"], ["a"], a=[printed("a1"), printed("a1", "a2")])
    assert list(followed(Away(pods, at=(2, 4)), pods.read, pause_s=0.01)) == ["a1", "a2"]


def test_a_cluster_that_is_away_at_first_or_for_long_is_told(monkeypatch):
    monkeypatch.setattr(kubernetes_logs, "_MAX_SILENCE_S", 0.1)
    pods = Pods(["a"], ["a"], a=[printed("a1")])
    with pytest.raises(EngineUnreachable):
        next(followed(Away(pods, at=(1,)), pods.read))
    lines = followed(Away(pods, at=range(2, 1000)), pods.read, pause_s=0.01)
    assert next(lines) == "a1"
    with pytest.raises(EngineUnreachable):
        next(lines)


def test_a_log_that_cannot_be_read_is_told():
    def broken():
        yield from printed("a")
        raise PenstockError("the cluster is gone")

    lines = Pods(["a"], a=[broken()]).lines()
    assert next(lines) == "a"
    with pytest.raises(PenstockError, match="the cluster is gone"):
        next(lines)


def test_lines_of_the_first_pod_that_are_cut_or_of_another_kind_tell_nothing():
    lines = ['[progress] {"step": 1}\n', '[progress] {"st', "[progress] 3\n", '[rank 0] {"step": 2}\n', "\n"]
    assert kubernetes_logs._printed(lines, PROGRESS) == [{"step": 1}]
