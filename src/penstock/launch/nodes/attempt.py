"""Attempts of a run on this machine, forked from a process that has imported everything.

    launcher or node            threads of a rendezvous, a lock, signals
      warm process              imported torch, has no threads: safe to fork
        attempt                 forwards SIGTERM once, collects messages and exit codes (launch/local.py)
          rank, rank, ...

Importing torch takes seconds, and an elastic run starts its processes at every change of nodes. The kernel
kills each row of the drawing when the one above it ends in any way, so that no rank outlives its supervisor.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from penstock.core import clock
from penstock.launch.local import EXIT_STOPPED, JobOutcome, RankProcess, die_with, run_at

_HELD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_WARM_UP_S = 60.0
BASE_PORT, NUM_PORTS = 20_000, 20_000
"""Ports of a rendezvous: the first, and how many."""

Work = Callable[[], int]
Explain = Callable[[BaseException], tuple[str, int]]
Environment = Mapping[str, str]


def rank_processes(
    environments: Sequence[Environment], logs: Callable[[int], Path], title: str
) -> list[RankProcess]:
    """Return the processes of this machine; each prints into its rank's log file.

    Their work begins with `StopFlag.install`.

    Args:
        environments: variables of each process, RANK and WORLD_SIZE among them.
        logs: rank -> its log file.
        title: of the start, for the logs.
    """
    return [
        RankProcess(
            environment,
            partial(_print_into, logs(int(environment["RANK"])), title, environment),
            holds_signals=True,
        )
        for environment in environments
    ]


def rank_environments(
    *, node: int, num_nodes: int, processes: int, address: str, port: int
) -> list[dict[str, str]]:
    """Return the variables of the processes of one node, as torchrun names them.

    >>> found = rank_environments(node=1, num_nodes=2, processes=2, address="10.0.0.1", port=29500)
    >>> [(each["RANK"], each["LOCAL_RANK"], each["WORLD_SIZE"]) for each in found]
    [('2', '0', '4'), ('3', '1', '4')]
    """
    return [
        {
            "RANK": str(node * processes + index),
            "LOCAL_RANK": str(index),
            "WORLD_SIZE": str(num_nodes * processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(num_nodes),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for index in range(processes)
    ]


def port_of(job: int, attempt: int) -> int:
    """Return the port of the rendezvous of an attempt: another one for each job and attempt.

    >>> port_of(12, 0), port_of(12, 1)
    (20084, 20085)
    """
    return BASE_PORT + (7 * job + attempt) % NUM_PORTS


def _print_into(log: Path, title: str, environment: Environment) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    head = f"--- {title}: rank {environment['RANK']} of {environment['WORLD_SIZE']} ---\n"
    os.write(descriptor, head.encode())
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def judged(outcome: JobOutcome) -> JobOutcome:
    """Return an outcome in which processes that died of the forwarded stop have stopped, not failed.

    Slurm sends a stop to the processes themselves, too, whose handlers may be gone already when they exit.
    """
    if outcome.stop_requested and outcome.lost and all("SIGTERM" in message for message in outcome.messages):
        return JobOutcome(EXIT_STOPPED, [], (), stop_requested=True)
    return outcome


class WarmProcess:
    """Process that forks attempts; make it before this process starts a thread.

    Args:
        work: of each rank; returns an exit code.
        explain: converts an error to a message and an exit code.
        logs: rank -> its log file.
    """

    def __init__(self, work: Work, explain: Explain, logs: Callable[[int], Path]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._connection, work, explain, logs, os.getpid())
        )
        held = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
        theirs.close()
        self._attempt: int | None = None

    def start(self, environments: Sequence[Environment], *, title: str) -> None:
        """Start the processes of an attempt; the one before has ended."""
        self._connection.send((list(map(dict, environments)), title))
        if not self._connection.poll(_WARM_UP_S):
            raise ChildProcessError("the warm process does not answer")
        self._attempt = self._connection.recv()

    def poll(self) -> JobOutcome | None:
        """Return the outcome of the attempt once all its processes have ended."""
        try:
            if self._attempt is None or not self._connection.poll():
                return None
            outcome: JobOutcome = self._connection.recv()
        except (EOFError, OSError):
            outcome = JobOutcome(1, ["The process that starts the ranks is gone."])
        self._attempt = None
        return outcome

    def stop(self) -> None:
        """Ask the processes to stop after saving."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the processes."""
        self._signal(signal.SIGKILL)  # the kernel kills the ranks with the attempt

    def _signal(self, number: signal.Signals) -> None:
        if self._attempt is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(self._attempt, number)

    def close(self) -> None:
        """End the process, and an attempt that still runs with it."""
        self.kill()
        self._connection.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


def _serve(
    connection: Connection,
    other_end: Connection,
    work: Work,
    explain: Explain,
    logs: Callable[[int], Path],
    parent: int,
) -> None:
    die_with(parent)
    other_end.close()  # else the parent's closing would not be seen
    for number in _HELD:
        signal.signal(number, signal.SIG_IGN)
    context = multiprocessing.get_context("fork")
    while True:
        try:
            environments, title = connection.recv()
        except (EOFError, OSError):
            os._exit(0)
        receiver, sender = context.Pipe(duplex=False)
        arguments = (sender, work, explain, rank_processes(environments, logs, title), os.getpid())
        attempt = context.Process(target=_attempt, args=arguments)
        attempt.start()
        sender.close()
        connection.send(attempt.pid)
        wait([receiver, attempt.sentinel])  # first the messages: many long ones fill the pipe
        try:
            outcome = receiver.recv() if receiver.poll() else None
        except EOFError:
            outcome = None
        receiver.close()
        attempt.join()
        attempt.close()
        with suppress(OSError):  # nobody listens any more: the next `recv` ends this process
            connection.send(outcome or JobOutcome(1, ["The processes were killed."], (0,)))


def _attempt(sender: Connection, work: Work, explain: Explain, ranks: list[RankProcess], parent: int) -> None:
    die_with(parent)
    for number in _HELD:  # still blocked: what arrives now is delivered once there are ranks to forward to
        signal.signal(number, signal.SIG_DFL)
    sender.send(judged(run_at(work, explain, ranks)))
    sender.close()
    os._exit(0)


def follow(path: Path, *, parent: int) -> None:
    """Print what is appended to a file, from its present end, until the parent ends or nobody reads on."""
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    begin = path.stat().st_size if path.is_file() else 0
    while True:
        if path.is_file():
            with path.open("rb") as file:
                file.seek(begin)
                while piece := file.read(65536):
                    try:
                        os.write(1, piece)
                    except BrokenPipeError:  # as of `| head`; the job goes on, and its log
                        return
                    begin += len(piece)
        clock.sleep(0.2)
