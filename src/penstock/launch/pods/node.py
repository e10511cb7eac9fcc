"""One pod of a run: its checks, the server of the rendezvous in the first one, the node's supervisor.

    pod 0   server, printer, supervisor -> warm process -> ranks 0, 1, ...
    pod 1           printer, supervisor -> warm process -> ranks P, P+1, ...

The supervisors meet there, whether the number of nodes is fixed or not (elastic_agent.py): a lost pod
is replaced by its Job, joins, and all go on from the newest checkpoint without a restart of the other pods.
"""

import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.core import clock, env
from penstock.core.errors import UsageError
from penstock.core.log import EventLog
from penstock.core.network.probe import probe_nics
from penstock.launch.job_folder import JobFolder
from penstock.launch.local import EXIT_STOPPED, die_with
from penstock.launch.nodes.attempt import Explain, Work
from penstock.launch.nodes.elastic_agent import NodeSettings, run_elastic_node
from penstock.launch.nodes.node import prepare
from penstock.launch.pod_networks import declared
from penstock.launch.pods.check import check_networks
from penstock.launch.pods.code import fetched, unpack
from penstock.launch.pods.preflight import examine_pods, is_examined
from penstock.launch.render.jobset import host_of
from penstock.launch.render.kubernetes import pod_of
from penstock.launch.render.pod_template import CODE
from penstock.launch.rendezvous.server import start_server
from penstock.launch.rendezvous.signed import check_key, new_key
from penstock.launch.spec import RunSpec

log = EventLog(__name__)

EVENT = "[event] "
"""Beginning of the lines of the first pod's log that are transitions of the run, as JSON."""
PROGRESS = "[progress] "
"""Beginning of the lines of the first pod's log with the run's progress, as JSON."""
_PROGRESS_EVERY_S = 30.0
_PRINT_S = 30.0
"""Seconds that a pod waits for its last lines."""
_BASE_PORT, _NUM_PORTS = 20_000, 10_000
_JOIN_S = 1800
"""Seconds that pods wait for each other: a node may have to be added to the cluster. Then they end with 75,
which is not counted: new pods go on waiting."""
_PAST_EVENTS = 100
"""Transitions before its own that the first pod prints: those of pods whose logs are gone."""
_LINGER_S = 3.0
"""Seconds for which the server outlives the first pod's ranks, so that the others read how the run ended."""
_POLL_S = 0.2
_MAX_BYTES = 1 << 20


def store_port(namespace: str, name: str) -> int:
    """Return the port of a run's rendezvous, the same in all pods; below the range of outgoing connections.

    >>> store_port("default", "first")
    22904
    """
    return _BASE_PORT + zlib.crc32(f"{namespace}/{name}".encode()) % _NUM_PORTS


def rank_mark(rank: int) -> str:
    """Return the beginning of a rank's lines in the log of its pod.

    >>> rank_mark(3)
    '[rank 3] '
    """
    return f"[rank {rank}] "


def unpack_code(spec: RunSpec, folder: Path) -> bool:
    """Unpack the run's code; return True if this process has to start again to import it.

    Raises:
        PenstockError: the code is missing or another one.
    """
    code = pod_of(spec).code
    if code is None or str(folder) in sys.path:
        return False
    unpack(fetched(code, Path(CODE)), folder)
    return True


def check_pod(spec: RunSpec) -> None:
    """Check this pod, and set the variables of its processes.

    Raises:
        PenstockError: a folder, a secret or a network is missing.
    """
    pod = pod_of(spec)
    prepare(spec)
    present = probe_nics()
    wanted = declared(pod.network_provider, pod.networks)
    settings = check_networks(wanted, present, env.variables("NCCL_", "GLOO_"))
    env.set_variables({s.name: s.value for s in settings if not env.variable(s.name)})


def node_of_pod() -> int:
    """Return the number of the node that this pod is.

    Raises:
        UsageError: this is not a pod of an Indexed Job.
    """
    if not env.variable("JOB_COMPLETION_INDEX"):
        raise UsageError(
            "`penstock launch pod` is started by Kubernetes, in the pods of a run",
            fix="Type `penstock launch kubernetes RECIPE`.",
        )
    return env.whole("JOB_COMPLETION_INDEX", 0)


def run_pod(
    spec: RunSpec, folder: JobFolder, work: Work, explain: Explain, *, node: int, scratch: Path
) -> int:
    """Run this pod to its end; return its exit code. This process has no threads, and holds SIGTERM back.

    Args:
        work: of each rank; what it needs is imported already.
        node: its number.
        scratch: folder of this pod for logs of its ranks.
    """
    job, given = env.variable(env.JOB), env.take_rendezvous_key()
    folder.make()
    if is_over(folder, job):  # this pod was lost after the last step, or comes too late
        return 0
    if node == 0:
        folder.mark_started(job)
    host, port = host_of(spec.name), store_port(pod_of(spec).namespace, spec.name)
    if not is_examined(spec, folder, job=job) and not examine_pods(
        spec, folder, node=node, host=host, port=port - _NUM_PORTS, job=job
    ):
        return EXIT_STOPPED
    key = _key_of(spec, given)
    with _printed(folder, scratch, is_first=node == 0), _rendezvous(spec, key, port, is_here=node == 0):
        if not _wait_for(host, port, is_over=lambda: is_over(folder, job)):
            return 0 if is_over(folder, job) else EXIT_STOPPED
        settings = NodeSettings(
            node=node,
            host=host,
            port=port,
            key=key,
            address=host_of(spec.name, node),
            join_s=_JOIN_S,
            gone_code=EXIT_STOPPED,
        )
        code = run_elastic_node(
            spec, folder, settings, work, explain, logs=lambda rank: scratch / f"rank-{rank:05d}.log"
        )
        if code == EXIT_STOPPED and job and folder.is_to_stop(job):  # for good: 75 would replace the pod
            code = 0
        if code == 0 and job:
            folder.mark_finished(job)
        if node == 0:
            clock.sleep(_LINGER_S)
        return code


def is_over(folder: JobFolder, job: str) -> bool:
    """True if a job has run the last step, or was stopped for good."""
    return bool(job) and (folder.finished_job() == job or folder.is_to_stop(job))


def _key_of(spec: RunSpec, given: str) -> str:
    """Return the key of the rendezvous; a run of one pod makes it.

    Args:
        given: by the Secret of the run; empty: none.

    Raises:
        UsageError: this pod has none, or one that is too short.
    """
    if not given and spec.nodes.most == 1:
        return new_key()
    if not given:
        raise UsageError(
            f"This pod has no {env.RENDEZVOUS_KEY}, and without a key it does not listen for other nodes",
            fix="Launch the run again: `penstock launch kubernetes` and the operator make a Secret with it.",
        )
    return check_key(given, name=env.RENDEZVOUS_KEY)


@contextmanager
def _rendezvous(spec: RunSpec, key: str, port: int, *, is_here: bool) -> Iterator[None]:
    if not is_here:
        yield
        return
    server, _ = start_server(spec.nodes, key=key, address="", port=port)
    try:
        yield
    finally:
        server.kill()
        server.join()
        server.close()


def _wait_for(host: str, port: int, *, is_over: Callable[[], bool]) -> bool:
    """Wait until the first pod answers; False: it does not, this pod was told to stop, or the run is over."""
    end = clock.monotonic() + _JOIN_S
    while signal.SIGTERM not in signal.sigpending():
        with suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return True
        if is_over():
            return False
        if clock.monotonic() > end:
            log.warning(
                "first_pod_silent",
                "{host}:{port}, the first pod, has not answered for {waited_s:duration}",
                host=host,
                port=port,
                waited_s=_JOIN_S,
            )
            return False
        clock.sleep(1.0)
    return False


@contextmanager
def _printed(folder: JobFolder, scratch: Path, *, is_first: bool) -> Iterator[None]:
    """Print what this pod's ranks print, and keep it in the run's folder; the first prints the run's, too."""
    scratch.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_print_logs, args=(folder, scratch, is_first, os.getpid()))
    process.start()
    try:
        yield
    finally:
        process.terminate()  # after it has read once more
        process.join(_PRINT_S)
        if process.is_alive():  # the run's storage hangs
            process.kill()
            process.join()
        process.close()


def _print_logs(folder: JobFolder, scratch: Path, is_first: bool, parent: int) -> None:
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))
    read: dict[Path, int] = {}
    run = _RunPrinter(folder) if is_first else None
    while True:
        is_last = signal.SIGTERM in signal.sigpending()
        for path in sorted(scratch.glob("rank-*.log")):
            rank = int(path.stem.removeprefix("rank-"))
            size = path.stat().st_size  # a rank that prints on and on holds up no other
            at = read.get(path, 0)
            while at < size and (lines := new_lines(path, at, is_last=is_last)):
                at = read[path] = at + len(lines)
                for line in lines.splitlines():
                    os.write(1, rank_mark(rank).encode() + line + b"\n")
                with suppress(OSError), folder.log_of(rank).open("ab") as kept:  # a full disk ends no run
                    kept.write(lines)
        if run is not None:
            with suppress(OSError):  # the volume is away for a moment
                run.print(is_last=is_last)
        if is_last:
            return
        clock.sleep(_POLL_S)


def new_lines(log: Path, at: int, *, is_last: bool) -> bytes:
    """Return the whole lines of a log after a position, 1 MiB at most.

    Args:
        at: bytes that were read before.
        is_last: return the end of the log too if it is no whole line, as a line of more than 1 MiB.
    """
    with log.open("rb") as file:
        file.seek(at)
        found = file.read(_MAX_BYTES)
    whole = found[: found.rfind(b"\n") + 1]
    return found if not whole and (is_last or len(found) == _MAX_BYTES) else whole


class _RunPrinter:
    """Prints the run's transitions and progress, for `penstock launch status` outside of the cluster."""

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder
        self._events = max(0, len(folder.events()) - _PAST_EVENTS)
        self._bytes = 0
        self._told, self._told_at = "", -math.inf

    def print(self, *, is_last: bool) -> None:
        if (size := self._folder.bytes_of_events()) != self._bytes:
            new = self._folder.events()[self._events :]
            self._bytes, self._events = size, self._events + len(new)
            for event in new:
                os.write(1, f"{EVENT}{json.dumps(event)}\n".encode())
        if is_last or clock.monotonic() - self._told_at > _PROGRESS_EVERY_S:
            self._told_at = clock.monotonic()
            progress = json.dumps(self._folder.progress())
            if progress != self._told:
                self._told = progress
                os.write(1, f"{PROGRESS}{progress}\n".encode())
