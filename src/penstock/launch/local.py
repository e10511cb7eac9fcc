"""Local launcher: runs a function in processes of this machine, as one job that fails or stops whole.

The processes are forked, so the parent's imports are not repeated (importing torch takes seconds). The parent
must not have started threads or used a GPU. Signals: the parent forwards SIGTERM, Ctrl-C and the end of its
terminal as SIGTERM, once; a second Ctrl-C kills. If one process fails the others are stopped, and if the
parent dies, the kernel kills them all. When a job has ended, the caller may restart it with another number of
processes.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from penstock.core.clock import monotonic
from penstock.core.env import RENDEZVOUS, num_cores
from penstock.core.errors import PeerLost, PenstockError, UsageError
from penstock.core.signals import signal_name
from penstock.core.units import plural

_PR_SET_PDEATHSIG = 1
_GRACE_S = 20.0
_CAUSE_S = 3.0  # a rank that fails closes its sockets, and reports its error only then
_MESSAGE_CHARS = 10_000  # fits a pipe, so that writing never waits for the parent, which reads at the end
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EXIT_INTERRUPTED = 130
"""Exit code: a second Ctrl-C ended the job at once."""
EXIT_STOPPED = 75
"""Exit code: a process stopped on request, after saving if its time allowed; not a failure."""


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """Outcome of a job: exit code and messages."""

    code: int
    """0 if every process returned 0, else the code of the first that failed, else EXIT_STOPPED.

    A process that lost contact with another counts as failed only if no other has failed.
    """
    messages: list[str]
    """Messages of failed processes, each once."""
    lost: tuple[int, ...] = ()
    """Ranks that were killed from outside, if nothing else went wrong."""
    stop_requested: bool = False
    """True if the job was asked to stop by a signal."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """Process of one rank: its environment, and what it does first."""

    environment: Mapping[str, str]
    """Environment variables added to the parent's."""
    set_up: Callable[[], None] = lambda: None
    """Called by the process before its work, as to enter a network namespace."""
    holds_signals: bool = False
    """True: signals stay blocked until the work has a handler for them (`StopFlag.install`): none ends a
    new process."""


PROCESSES_PER_CORE = 4
"""Processes of one job on each core that it may use: more make no progress, and fill the memory."""


def check_processes(processes: int, *, oversubscribe: bool | None = None) -> None:
    """Refuse a number of processes that this machine cannot run; call before anything is forked.

    Args:
        oversubscribe: True: any number above 0. None: the command has no option for that.

    Raises:
        UsageError: none, or more than 4 for each core.
    """
    if processes < 1:
        raise UsageError("--processes must be at least 1", got=processes)
    cores = num_cores()
    if not oversubscribe and processes > PROCESSES_PER_CORE * cores:
        raise UsageError(
            f"{processes:,} processes on {plural(cores, 'core')}: this machine starts at most "
            f"{PROCESSES_PER_CORE * cores}, {PROCESSES_PER_CORE} for each core that the job may use",
            fix="Start fewer." if oversubscribe is None else "Start fewer; --oversubscribe starts them.",
        )


def run(
    work: Callable[[], int],
    explain: Callable[[BaseException], tuple[str, int]],
    *,
    processes: int,
    again: Callable[[JobOutcome], int] = lambda _: 0,
) -> JobOutcome:
    """Run `work` in each process, with RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set.

    Args:
        work: returns an exit code.
        explain: converts an error to a message and an exit code.
        again: given the outcome, returns the number of processes to restart with; 0: no restart. Not called
            if the job was asked to stop.

    Raises:
        UsageError: fewer than one process.
    """
    if processes < 1:
        raise UsageError("--processes must be at least 1", got=processes)
    with _held_signals() as before, tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        for start in count():
            meet = f"file://{Path(folder) / f'rendezvous-{start}'}"
            ranks = [
                RankProcess(_environment(rank, processes=processes, meet=meet)) for rank in range(processes)
            ]
            outcome, stop_requested = _run(work, explain, ranks, before)
            processes = 0 if stop_requested else again(outcome)
            if not processes:
                break
    return outcome


def run_at(
    work: Callable[[], int], explain: Callable[[BaseException], tuple[str, int]], ranks: Sequence[RankProcess]
) -> JobOutcome:
    """Run `work` in a process for each rank; see `run`.

    Signals that the caller has blocked are received while the processes run.
    """
    with _held_signals() as before:
        outcome, stop_requested = _run(work, explain, ranks, before.difference(_FORWARDED))
    return replace(outcome, stop_requested=stop_requested)


def _environment(rank: int, *, processes: int, meet: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        RENDEZVOUS: meet,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


@contextmanager
def _held_signals() -> Iterator[set[int]]:
    """Block signals until there are processes to forward them to; yield the earlier mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    work: Callable[[], int],
    explain: Callable[[BaseException], tuple[str, int]],
    ranks: Sequence[RankProcess],
    before: set[int],
) -> tuple[JobOutcome, bool]:
    """Return the outcome, and whether the job was asked to stop; signals are blocked before and after."""
    children = _start(work, explain, ranks)
    with _Forwarding(children) as forwarding:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            outcome = _wait(children)
        except BaseException:  # else the end of this process waits for them
            _kill(children)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    if forwarding.has_killed:
        return JobOutcome(EXIT_INTERRUPTED, ["Interrupted."]), True
    return outcome, forwarding.stop_requested


def _start(
    work: Callable[[], int], explain: Callable[[BaseException], tuple[str, int]], ranks: Sequence[RankProcess]
) -> dict[BaseProcess, Connection]:
    """Fork the processes; return them by rank, each with a pipe for one message."""
    context = multiprocessing.get_context("fork")
    children: dict[BaseProcess, Connection] = {}
    try:
        for rank in ranks:
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=_child, args=(work, explain, sender, rank, os.getpid()))
            child.start()
            sender.close()
            children[child] = receiver
    except OSError as error:  # no more processes, memory or files
        _kill(children)
        raise PenstockError(
            f"Process {len(children) + 1} of {len(ranks)} cannot be started: {error.strerror}",
            fix="Start fewer, or raise the limit of processes, files or memory (ulimit -a, the container's).",
        ) from None
    return children


def _kill(children: Mapping[BaseProcess, Connection]) -> None:
    for child, receiver in children.items():
        child.kill()
        child.join()
        receiver.close()


def _child(
    work: Callable[[], int],
    explain: Callable[[BaseException], tuple[str, int]],
    sender: Connection,
    rank: RankProcess,
    parent: int,
) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):  # forwarded by the parent
        signal.signal(number, signal.SIG_IGN)
    if not rank.holds_signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    os.environ.update(rank.environment)
    try:
        rank.set_up()
        code = work()
    except BaseException as error:  # whatever ends this rank, the parent must be told
        try:
            message, code = explain(error)
        except BaseException:  # `explain` raises what it does not know, and all with --debug
            sys.excepthook(type(error), error, error.__traceback__)
            message, code = "", 1
        sender.send(message[:_MESSAGE_CHARS])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: peers' sockets may already be gone


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call
        os._exit(1)


class _Forwarding:
    """Forward SIGTERM, SIGINT and, unless ignored by `nohup`, SIGHUP to the children."""

    def __init__(self, children: dict[BaseProcess, Connection]) -> None:
        self._children = children
        self._interrupts = 0
        self.stop_requested = False
        """True if a signal was received."""

    @property
    def has_killed(self) -> bool:
        """True if a second Ctrl-C killed the processes."""
        return self._interrupts > 1

    def __enter__(self) -> "_Forwarding":
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._before = {s: signal.signal(s, self._forward) for s in _FORWARDED if s not in ignored}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.stop_requested = True
        self._interrupts += number == signal.SIGINT
        for child in self._children:
            if child.is_alive():
                child.kill() if self.has_killed else child.terminate()


def _wait(children: dict[BaseProcess, Connection]) -> JobOutcome:
    said: dict[str, None] = {}  # in order, each once
    killed: dict[int, str] = {}
    code, code_of_lost_contact, is_asked = 0, 0, False
    deadline = 0.0  # of the report that explains a lost contact; 0: no contact was lost
    running, rank_of = list(children), {child: rank for rank, child in enumerate(children)}
    while running:
        patience = _GRACE_S if is_asked else max(0.0, deadline - monotonic()) if deadline else None
        ready = wait([child.sentinel for child in running], timeout=patience)
        if is_asked and not ready:  # they did not stop in time
            for child in running:
                child.kill()
        for child in [child for child in running if child.sentinel in ready]:
            child.join()  # the kernel closes the sentinel slightly before the exit code is available
            message, signal_number = _message_of(children[child]), max(0, -(child.exitcode or 0))
            exit_code = 1 if signal_number else child.exitcode or 0
            is_aborted = bool(deadline) and signal_number == signal.SIGABRT  # by NCCL's watchdog
            if is_aborted or (message and PeerLost.SENTENCE in message):
                code_of_lost_contact = code_of_lost_contact or exit_code
                deadline = deadline or monotonic() + _CAUSE_S
            elif exit_code and code in (0, EXIT_STOPPED):  # a failure has priority over a stop
                code = exit_code
            if message is None and signal_number and not (is_asked or is_aborted):
                killed[rank_of[child]] = _killed(rank_of[child], signal_number)
            said.update({message: None} if message else {})
            running.remove(child)
        if not is_asked and (code not in (0, EXIT_STOPPED) or not ready):
            is_asked = True
            for child in running:
                _ask_to_stop(child)
    causes = [message for message in said if PeerLost.SENTENCE not in message]
    code = code_of_lost_contact or code if code in (0, EXIT_STOPPED) else code
    return JobOutcome(code, [*killed.values(), *causes] or [*said][:1], () if causes else tuple(killed))


def _message_of(receiver: Connection) -> str | None:
    with receiver:
        try:
            return str(receiver.recv())
        except EOFError:  # it ended without one
            return None


def _ask_to_stop(child: BaseProcess) -> None:
    child.terminate()
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGCONT)  # a suspended process receives signals only after it continues


def _killed(rank: int, number: int) -> str:
    memory = " The machine may have run out of memory: see dmesg." if number == signal.SIGKILL else ""
    return f"Rank {rank} was killed by {signal_name(number)}.{memory}"
