"""This machine as an engine: nodes are groups of processes, all children of one launcher.

    launcher ---- ranks of a fixed number of nodes         one attempt after another (nodes/supervisor.py)
       |
       +--------- rendezvous, node 0, node 1, ... of an elastic run  (nodes/elastic_agent.py)

The launcher imports torch once and forks everything else, so a node that joins imports nothing. Every process
dies with its parent, the launcher's end included.
"""

import multiprocessing
import os
import platform
import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path

from penstock.core import clock
from penstock.core.env import num_cores
from penstock.core.errors import PenstockError, UsageError
from penstock.core.signals import StopFlag, signal_name
from penstock.core.units import plural
from penstock.launch.engines.engine import JobState, QueuedJob
from penstock.launch.job_folder import Job, JobFolder
from penstock.launch.local import EXIT_STOPPED, die_with
from penstock.launch.nodes.attempt import Explain, WarmProcess, Work, follow, port_of, rank_environments
from penstock.launch.nodes.elastic_agent import NodeSettings, run_elastic_node
from penstock.launch.nodes.node import prepare
from penstock.launch.nodes.supervisor import supervise_gang
from penstock.launch.render.local import local_settings
from penstock.launch.rendezvous.server import start_server
from penstock.launch.rendezvous.signed import new_key
from penstock.launch.spec import NodeRange, RunSpec
from penstock.launch.supervise import FINAL_CODES, Ended, newest_as_text

_HERE = "127.0.0.1"
_POLL_S = 0.2
_CANCEL_S = 30.0  # more than the grace, for a launcher that tidies up


def run_local(
    spec: RunSpec,
    folder: JobFolder,
    work: Work,
    explain: Explain,
    *,
    flag: StopFlag,
    say: Callable[[str], None],
) -> int:
    """Run a job on this machine to its end; return its exit code. This process has no threads yet.

    Args:
        work: of each rank; what it needs is imported already.
        say: prints a sentence for the user.

    Raises:
        RunLocked: another launcher runs it.
    """
    folder.make()
    with folder.held():
        folder.forget()
        folder.write_spec(spec)
        submitted = Job(
            engine="local", ident=str(os.getpid()), host=platform.node(), submitted_at=clock.utc_now()
        )
        folder.write_job(submitted)
        folder.log_event("submitted", cause=f"to this machine, process {os.getpid()}", nodes=str(spec.nodes))
        prepare(spec, local_settings(spec, cores=num_cores()))
        with _followed(folder.log_of(0)):
            if spec.nodes.is_elastic:
                return _Nodes(spec, folder, work, explain, flag, say).run()
            warm = WarmProcess(work, explain, folder.log_of)
            try:
                gang = _LocalGang(warm)
                return supervise_gang(spec, folder, gang, flag, can_requeue=False, on_event=say)
            finally:
                warm.close()


@contextmanager
def _followed(log: Path) -> Iterator[None]:
    """Print the first rank's log while the job runs."""
    parent = os.getpid()
    process = multiprocessing.get_context("fork").Process(
        target=follow, args=(log,), kwargs={"parent": parent}
    )
    process.start()
    try:
        yield
    finally:
        clock.sleep(0.5)  # for the last lines
        process.kill()
        process.join()
        process.close()


class _LocalGang:
    def __init__(self, warm: WarmProcess) -> None:
        self._warm = warm

    def start(self, spec: RunSpec, attempt: int) -> None:
        port = port_of(os.getpid(), attempt)
        environments = [
            environment
            for node in range(spec.nodes.most)
            for environment in rank_environments(
                node=node, num_nodes=spec.nodes.most, processes=spec.processes, address=_HERE, port=port
            )
        ]
        self._warm.start(environments, title=f"{clock.utc_now()} start {attempt + 1}")

    def poll(self) -> Ended | None:
        outcome = self._warm.poll()
        if outcome is None:
            return None
        return Ended(code=outcome.code, newest=-1, cause=" ".join(outcome.messages))

    def stop(self) -> None:
        self._warm.stop()

    def kill(self) -> None:
        self._warm.kill()


class _Nodes:
    """Nodes of an elastic run on this machine: started, asked to leave, missed when they are killed."""

    def __init__(
        self,
        spec: RunSpec,
        folder: JobFolder,
        work: Work,
        explain: Explain,
        flag: StopFlag,
        say: Callable[[str], None],
    ) -> None:
        self._spec, self._folder, self._work, self._explain = spec, folder, work, explain
        self._flag, self._say = flag, say
        self._running: dict[int, BaseProcess] = {}
        self._codes: list[int] = []
        self._leaving: set[int] = set()
        self._started = 0
        self._port, self._key = 0, new_key()

    def run(self) -> int:
        server, self._port = start_server(self._spec.nodes, key=self._key, address=_HERE)
        kill_at = float("inf")
        try:
            for _ in range(self._spec.nodes.most):
                self._add()
            while self._running:
                clock.sleep(_POLL_S)
                self._poll()
                if nodes := self._folder.take_request():
                    self._resize(nodes)
                if self._flag.requested_by and kill_at == float("inf"):
                    self._tell("stop", f"stop requested by {self._flag.requested_by}: all nodes save and end")
                    self._leave(list(self._running))
                    kill_at = clock.monotonic() + self._spec.grace_s
                    self._codes = [code for code in self._codes if code in FINAL_CODES]  # others went on
                if clock.monotonic() > kill_at:
                    for process in self._running.values():
                        process.kill()
            code = self._code()
            newest = self._folder.newest_step()
            why = ": stopped by request" if self._folder.is_to_stop() else ""
            self._tell(
                "finish", f"all nodes have ended, exit code {code}{why}, {newest_as_text(newest)}", code=code
            )
            return code
        finally:
            for process in [*self._running.values(), server]:
                process.kill()
                process.join()
            for process in [*self._running.values(), server]:
                process.close()

    def _add(self) -> None:
        node = self._started
        self._started += 1
        settings = NodeSettings(
            node=node,
            host=_HERE,
            port=self._port,
            key=self._key,
            join_pause_s=0.0,  # nodes come only when somebody asks for them
        )
        arguments = (self._spec, self._folder, settings, self._work, self._explain, os.getpid())
        process = multiprocessing.get_context("fork").Process(target=_node, args=arguments)
        held = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))  # until the node handles it
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        self._running[node] = process
        self._tell("node", f"node {node} is started, process {process.pid}", nodes=len(self._running))

    def _leave(self, nodes: list[int]) -> None:
        for node in nodes:
            self._leaving.add(node)
            self._running[node].terminate()

    def _poll(self) -> None:
        for node in [node for node, process in self._running.items() if not process.is_alive()]:
            process = self._running.pop(node)
            process.join()
            code = process.exitcode or 0
            process.close()
            if code < 0:
                self._tell(
                    "lost",
                    f"node {node} was killed by {signal_name(-code)}",
                    nodes=len(self._running),
                )
                self._codes.append(1)
                continue
            if not (code == EXIT_STOPPED and node in self._leaving and not self._flag.requested_by):
                self._codes.append(code)
            left = plural(len(self._running), "node")
            self._tell("left", f"node {node} has ended with exit code {code}, {left} left")

    def _resize(self, nodes: int) -> None:
        staying = [node for node in self._running if node not in self._leaving]
        self._tell("resize", f"from {len(staying)} to {plural(nodes, 'node')}")
        self._leave(staying[nodes:])
        for _ in range(nodes - len(staying)):
            self._add()

    def _code(self) -> int:
        for code in FINAL_CODES:
            if code in self._codes:
                return code
        return next((code for code in self._codes if code != EXIT_STOPPED), EXIT_STOPPED)

    def _tell(self, event: str, cause: str, **values: int) -> None:
        self._folder.log_event(event, cause=cause, **values)
        self._say(cause)


def _node(
    spec: RunSpec,
    folder: JobFolder,
    settings: NodeSettings,
    work: Work,
    explain: Explain,
    parent: int,
) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hands on a Ctrl-C
    try:
        code = run_elastic_node(spec, folder, settings, work, explain)
    except PenstockError as error:
        os.write(2, f"penstock: node {settings.node}: {error}\n".encode())
        code = error.exit_code
    os._exit(code)  # no interpreter shutdown: it is a fork of the launcher


class _Local:
    def state(self, job: Job, folder: JobFolder) -> JobState:
        """Return whether the launcher runs."""
        end = folder.end()
        if folder.is_held():
            status = "STARTING" if end is None and not folder.is_trained() else "RUNNING"
            return JobState(is_live=True, status=status, reason=f"process {job.ident} on {job.host}")
        reason = "the launcher was killed" if end is None else str(end.get("cause", ""))
        return JobState(is_live=False, status="ENDED", reason=reason)

    def jobs(self, _host: str, _known: Collection[str] = ()) -> dict[str, QueuedJob]:
        """Return no jobs: only the folder of a run tells whether its launcher runs."""
        return {}

    def cancel(self, job: Job, folder: JobFolder, *, now: bool) -> str:
        """Signal the launcher, and wait for its end.

        Raises:
            PenstockError: it had ended, does not end, or its processes failed or were killed meanwhile.
        """
        _check_running(job, folder)
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(int(job.ident), signal.SIGKILL if now else signal.SIGTERM)
        end = clock.monotonic() + folder.spec().grace_s + _CANCEL_S
        while folder.is_held():
            if clock.monotonic() > end:
                raise PenstockError(
                    f"Process {job.ident} has not ended",
                    fix="See `penstock launch status`; --now kills it without saving.",
                )
            clock.sleep(_POLL_S)
        if now:
            return f"killed process {job.ident}"
        ended = folder.end()
        if ended is None or ended.get("code") not in (0, EXIT_STOPPED):
            cause = "its launcher was killed" if ended is None else ended.get("cause", "")
            raise PenstockError(
                f"The run ended without a stop after saving: {cause}",
                fix="Launch it again: it continues from its newest checkpoint. A longer --grace may help.",
            )
        return str(ended.get("cause", ""))

    def resize(self, job: Job, folder: JobFolder, nodes: NodeRange) -> str:
        """Ask the launcher for another number of nodes."""
        _check_running(job, folder)
        folder.ask_for_nodes(nodes.most)
        return f"requested {plural(nodes.most, 'node')}; the run saves, and continues with them"


def _check_running(job: Job, folder: JobFolder) -> None:
    if not folder.is_held():
        raise PenstockError(
            f"No launcher runs on {folder.run}", fix=f"Process {job.ident} has ended: start it again."
        )
    if job.host != platform.node():
        raise UsageError(
            "The run was launched on another machine", got=job.host, fix=f"Type the command on {job.host}."
        )


ENGINE = _Local()
