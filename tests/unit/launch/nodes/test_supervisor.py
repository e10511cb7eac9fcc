"""The supervisor of a fixed number of nodes: when it starts attempts, and when it must not."""

import os

import pytest

from penstock.core.files import exclusive
from penstock.core.signals import StopFlag
from penstock.launch.engines.engine import stop_between_starts
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.nodes.supervisor import supervise_gang
from penstock.launch.supervise import EXIT_NO_PROGRESS, Ended, SupervisorState
from tests.unit.launch.test_spec import make_spec


class Attempts:
    """Attempts that end as they are told to."""

    def __init__(self, *codes, on_start=lambda: None):
        self.codes, self.on_start = list(codes), on_start
        self.starts, self.stops = 0, 0

    def start(self, _spec, _attempt):
        self.starts += 1
        self.on_start()

    def poll(self):
        if not self.codes:  # it runs until it is stopped
            return Ended(code=EXIT_STOPPED, newest=-1) if self.stops else None
        return Ended(code=self.codes.pop(0), newest=-1, cause="Rank 0 failed.")

    def stop(self):
        self.stops += 1

    def kill(self):
        raise AssertionError("nothing is killed here")


@pytest.fixture
def folder(tmp_path):
    found = JobFolder(tmp_path / "run")
    found.make()
    found.write_spec(make_spec(run_dir=str(found.run)))
    return found


def supervised(folder, gang):
    return supervise_gang(folder.spec(), folder, gang, StopFlag(), can_requeue=True)


def test_a_job_that_comes_back_after_a_request_to_stop_ends_at_once(folder):
    folder.ask_to_stop()  # then the job died while it saved, and was requeued
    gang = Attempts()
    assert (supervised(folder, gang), gang.starts) == (EXIT_STOPPED, 0)
    assert folder.events()[-1]["cause"] == "stopped by request before the processes were started"


def test_a_request_to_stop_between_two_starts_is_seen_before_the_next(folder):
    gang = Attempts(1, on_start=folder.ask_to_stop)
    assert (supervised(folder, gang), gang.starts) == (1, 1)
    assert "while stopping for request" in folder.events()[-1]["cause"]


def test_a_request_to_stop_while_the_processes_start_reaches_them(folder):
    gang = Attempts(on_start=folder.ask_to_stop)
    assert (supervised(folder, gang), gang.stops) == (EXIT_STOPPED, 1)


class KilledInTheirImports(Attempts):
    """Attempts that a signal kills before they could handle it."""

    def poll(self):
        return (
            Ended(code=1, newest=-1, cause="No node reported an end", lost_node=True) if self.stops else None
        )


def test_processes_that_a_stop_kills_while_they_start_lose_nothing_and_the_job_comes_back(folder):
    flag = StopFlag()

    def preempt():
        flag.requested_by = "SIGTERM"

    gang = KilledInTheirImports(on_start=preempt)
    assert supervise_gang(folder.spec(), folder, gang, flag, can_requeue=True) == EXIT_STOPPED
    assert folder.events()[-1]["cause"].endswith("while stopping for SIGTERM; no checkpoint yet")


class PowerCut(BaseException):
    """All that a supervisor notices of the loss of its own node: it writes nothing any more."""


@pytest.fixture
def lose_first_node(folder, monkeypatch):
    """Supervises a start that saves a checkpoint, or none, and is lost with the node of the supervisor."""
    newest = [-1]
    monkeypatch.setattr(JobFolder, "newest_known", lambda _: newest[0])

    def lose(*, saves=-1):
        def cut():
            newest[0] = max(newest[0], saves)
            raise PowerCut

        with pytest.raises(PowerCut):
            supervised(folder, Attempts(on_start=cut))

    return lose


def test_starts_that_are_lost_with_the_first_node_are_bounded_by_progress(folder, lose_first_node):
    for saves in (-1, -1, 4, -1, -1, -1):
        lose_first_node(saves=saves)
    gang = Attempts(0)
    assert (supervised(folder, gang), gang.starts) == (EXIT_NO_PROGRESS, 0)
    assert folder.events()[-1]["cause"].endswith("3 starts in a row without a new checkpoint: given up")


def test_a_checkpoint_of_a_lost_start_begins_the_count_again(folder, lose_first_node):
    for saves in (-1, -1, 4, -1, 5):
        lose_first_node(saves=saves)
    gang = Attempts(0)
    assert (supervised(folder, gang), gang.starts) == (0, 1)


def test_time_limits_that_end_each_start_before_a_checkpoint_end_the_run(folder):
    def told(_times):
        flag = StopFlag()
        gang = Attempts(on_start=lambda: setattr(flag, "requested_by", "SIGTERM"))
        return supervise_gang(folder.spec(), folder, gang, flag, can_requeue=True)

    assert [*map(told, range(3))] == [EXIT_STOPPED, EXIT_STOPPED, EXIT_NO_PROGRESS]
    assert "stopped by SIGTERM, no checkpoint yet. 3 starts in a row" in folder.events()[-1]["cause"]


def test_a_cancel_that_signals_the_script_is_a_request_and_no_start_without_progress(folder):
    folder.write_supervisor(SupervisorState(idle=2))
    flag = StopFlag()

    def cancel():
        folder.ask_to_stop()
        flag.requested_by = "SIGTERM"

    gang = Attempts(on_start=cancel)
    assert supervise_gang(folder.spec(), folder, gang, flag, can_requeue=True) == EXIT_STOPPED
    assert folder.events()[-1]["cause"] == "stopped by request, no checkpoint yet"


def test_processes_that_train_are_left_to_stop_by_themselves(folder):
    with exclusive(folder.run, purpose="training"):
        gang = Attempts(EXIT_STOPPED, on_start=folder.ask_to_stop)
        assert (supervised(folder, gang), gang.stops) == (EXIT_STOPPED, 0)
    assert folder.events()[-1]["cause"] == "stopped by request, no checkpoint yet"


def test_a_launched_run_without_processes_is_marked_while_its_launcher_is_there(folder):
    assert not stop_between_starts(folder), "it was not launched"
    folder.write_job(Job(engine="local", ident=str(os.getpid()), host="here", submitted_at="now"))
    assert not stop_between_starts(folder), "its launcher has ended"
    assert not folder.is_to_stop()
    with folder.held():
        assert "ends before its next start" in stop_between_starts(folder)
    assert folder.is_to_stop()
