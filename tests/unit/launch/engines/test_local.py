"""This machine as an engine: exit codes of elastic runs, and what `cancel` and `status` say of an end."""

import multiprocessing
import os
import platform
import signal
import subprocess
import time
from contextlib import contextmanager
from functools import partial

import pytest

from penstock.core import clock
from penstock.core.errors import PenstockError
from penstock.core.files import exclusive
from penstock.core.signals import StopFlag
from penstock.launch.engines import local
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.local import EXIT_STOPPED
from penstock.launch.spec import node_range
from tests.in_process import run_cli
from tests.unit.launch.test_spec import make_spec

# Python 3.12 warns of a fork where other tests have left library threads; these children use none.
pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path):
    made = JobFolder(tmp_path / "run")
    made.make()
    return made


def saves(*_):
    signal.sigwait({signal.SIGTERM})
    os._exit(EXIT_STOPPED)


def stands_still(*_):
    time.sleep(PATIENCE_S)


def dies(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def no_rendezvous(monkeypatch):
    """No rendezvous: nodes that do not meet."""

    def start(_nodes, **_):
        process = multiprocessing.get_context("fork").Process(target=stands_still)
        process.start()
        return process, 0

    monkeypatch.setattr(local, "start_server", start)


@pytest.mark.usefixtures("no_rendezvous")
@pytest.mark.parametrize(
    ("other", "stop_at", "code"),
    [
        pytest.param(saves, "node 1 is started", EXIT_STOPPED, id="both save"),
        pytest.param(stands_still, "node 1 is started", 1, id="one is killed after the grace"),
        pytest.param(dies, "node 1 was killed by SIGKILL", EXIT_STOPPED, id="one was lost before"),
    ],
)
def test_a_stopped_elastic_run_has_saved_only_if_every_node_that_was_left_has(
    folder, monkeypatch, other, stop_at, code
):
    monkeypatch.setattr(
        local, "_node", lambda _spec, _folder, settings, *_: (other if settings.node else saves)()
    )
    flag = StopFlag()

    def say(cause):
        if stop_at in cause:
            flag.requested_by = "SIGTERM"

    spec = make_spec(nodes=node_range("1:2"), grace_s=1.0 if other is stands_still else PATIENCE_S)
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # the nodes wait for it
    try:
        assert local._Nodes(spec, folder, lambda: 0, lambda _: ("", 1), flag, say).run() == code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    assert folder.events()[-1]["code"] == code


@pytest.mark.usefixtures("no_rendezvous")
def test_a_node_that_is_told_to_leave_before_it_can_handle_that_leaves_once_it_can(folder, monkeypatch):
    def run_node(*_, **__):
        return EXIT_STOPPED if signal.SIGTERM in signal.sigpending() else 1

    monkeypatch.setattr(local, "run_elastic_node", run_node)
    monkeypatch.setattr(local, "die_with", lambda _: time.sleep(0.3))  # a slow start on a busy machine
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    flag = StopFlag().install()  # the launcher's, whose handlers its processes inherit

    def say(cause):
        if "is started, process " in cause:
            os.kill(int(cause.rpartition(" ")[2]), signal.SIGTERM)

    try:
        spec = make_spec(nodes=node_range("1:2"))
        code = local._Nodes(spec, folder, lambda: 0, lambda _: ("", 1), flag, say).run()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert (code, flag.requested_by) == (EXIT_STOPPED, None)


def launcher(folder, code, cause):
    """Hold a run as its launcher does, until it is told to stop; code None: it dies then."""
    with folder.held():
        folder.write_job(Job(engine="local", ident=str(os.getpid()), host=platform.node(), submitted_at=""))
        signal.sigwait({signal.SIGTERM})
        if code is not None:
            folder.log_event("finish", cause=cause, code=code)
    os._exit(0)


@contextmanager
def launched(folder, code, cause):
    held = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    process = multiprocessing.get_context("fork").Process(target=partial(launcher, folder, code, cause))
    process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, held)
    try:
        end = clock.monotonic() + PATIENCE_S
        while not folder.has_job():
            assert clock.monotonic() < end
            time.sleep(0.01)
        yield folder.job()
    finally:
        process.kill()
        process.join()
        process.close()


def test_a_cancelled_run_is_said_to_be_what_its_launcher_ended_with(folder):
    folder.write_spec(make_spec())
    folder.log_event("finish", cause="stopped by SIGTERM, checkpoint 3", code=EXIT_STOPPED)
    folder.log_event("submitted", cause="to this machine")
    with launched(folder, EXIT_STOPPED, "stopped by SIGTERM, checkpoint 6") as job:
        assert local.ENGINE.cancel(job, folder, now=False) == "stopped by SIGTERM, checkpoint 6"


@pytest.mark.parametrize(
    ("code", "cause", "said"),
    [
        (1, "exit code 1, while stopping; checkpoint 5", "exit code 1, while stopping; checkpoint 5"),
        (None, "", "its launcher was killed"),
    ],
)
def test_a_cancelled_run_that_did_not_save_is_not_said_to_have(folder, code, cause, said):
    folder.write_spec(make_spec())
    folder.log_event("finish", cause="stopped by SIGTERM, checkpoint 3", code=EXIT_STOPPED)
    folder.log_event("submitted", cause="to this machine")
    with launched(folder, code, cause) as job, pytest.raises(PenstockError, match=said) as refused:
        local.ENGINE.cancel(job, folder, now=False)
    assert "ended without a stop after saving" in str(refused.value)


def test_a_run_starts_until_its_processes_train(folder):
    job = Job(engine="local", ident="1", host=platform.node(), submitted_at="")
    folder.log_event("finish", cause="stopped by SIGTERM, checkpoint 6", code=EXIT_STOPPED)
    with folder.held():
        assert run_cli("launch", "status", folder.run).stdout == "the job is starting\n"
        folder.write_spec(make_spec())
        folder.write_job(job)
        folder.log_event("submitted", cause="to this machine")
        assert local.ENGINE.state(job, folder).status == "STARTING"
        assert "STARTING" in run_cli("launch", "status", folder.run).stdout
        with exclusive(folder.run, purpose="penstock train"):
            assert local.ENGINE.state(job, folder).status == "RUNNING"
    assert local.ENGINE.state(job, folder).status == "ENDED"


def test_the_end_of_an_earlier_job_or_of_one_node_is_not_the_end_of_this_one(folder):
    job = Job(engine="local", ident="1", host=platform.node(), submitted_at="")
    folder.log_event("submitted", cause="to this machine")
    folder.log_event("finish", cause="stopped by SIGTERM, checkpoint 6", code=EXIT_STOPPED)
    assert local.ENGINE.state(job, folder).reason == "stopped by SIGTERM, checkpoint 6"
    folder.log_event("submitted", cause="to this machine")
    folder.log_event("finish", node=1, cause="stopped by SIGTERM, checkpoint 8", code=EXIT_STOPPED)
    assert local.ENGINE.state(job, folder).reason == "the launcher was killed"


def test_a_launcher_that_ends_just_as_it_is_cancelled_is_told_as_it_ended(folder, monkeypatch):
    folder.write_spec(make_spec())
    folder.log_event("finish", cause="finished", code=0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    looks = iter([True, False])
    monkeypatch.setattr(JobFolder, "is_held", lambda _: next(looks))
    job = Job(engine="local", ident=str(ended.pid), host=platform.node(), submitted_at="")
    assert local.ENGINE.cancel(job, folder, now=False) == "finished"
