"""Run a function in several processes of this machine, as one job that fails or stops as a whole.

The processes are forked, so what the parent has imported is not imported again (importing torch takes
seconds). The parent must not have started threads or touched a GPU. Signals: the parent passes SIGTERM,
Ctrl-C and the end of its terminal on as SIGTERM, once; a second Ctrl-C kills. If one process fails the others
are stopped, and if the parent dies, however it dies, the kernel kills them all. When a job has ended, whoever
started it may have it started anew on another number of processes.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from penstock.core.env import RENDEZVOUS
from penstock.core.errors import PeerLost, UsageError

_PR_SET_PDEATHSIG = 1
_GRACE_S = 20.0
_MESSAGE_CHARS = 10_000  # fits a pipe, so that saying it never waits for the parent, who reads at the end
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

EXIT_INTERRUPTED = 130
"""A second Ctrl-C ended the job at once."""
EXIT_STOPPED = 75
"""A process that stopped on request, after saving; not a failure."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    code: int
    """0 if every process returned 0, else the code of the first that failed, else EXIT_STOPPED."""
    messages: list[str]
    """What failed processes said, each message once."""
    lost: tuple[int, ...] = ()
    """Ranks that were killed from outside, where that is all that went wrong."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one process of a job runs, and what it is told."""

    environment: Mapping[str, str]
    """Added to the parent's."""
    enter: Callable[[], None] = lambda: None
    """Called by the process before its work, to go where that is done."""


def run(
    work: Callable[[], int],
    explain: Callable[[BaseException], tuple[str, int]],
    *,
    processes: int,
    again: Callable[[Outcome], int] = lambda _: 0,
) -> Outcome:
    """Run `work` in each process, with RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set.

    Args:
        work: returns an exit code.
        explain: turns an error into a paragraph and an exit code.
        again: given how all ended, says on how many processes to start anew; 0: not. It is not asked where
            the job was told to stop.

    Raises:
        UsageError: fewer than one process.
    """
    if processes < 1:
        raise UsageError("--processes must be at least 1", got=processes)
    with _held_signals() as before, tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        for start in count():
            meet = f"file://{Path(folder) / f'rendezvous-{start}'}"
            seats = [Seat(_environment(rank, processes=processes, meet=meet)) for rank in range(processes)]
            outcome, was_told = _run(work, explain, seats, before)
            processes = 0 if was_told else again(outcome)
            if not processes:
                break
    return outcome


def run_at(
    work: Callable[[], int], explain: Callable[[BaseException], tuple[str, int]], seats: Sequence[Seat]
) -> Outcome:
    """Run `work` in a process for each seat; see `run`."""
    with _held_signals() as before:
        outcome, _ = _run(work, explain, seats, before)
    return outcome


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
    """Hold signals back until there is someone to forward them to; give the mask of before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    work: Callable[[], int],
    explain: Callable[[BaseException], tuple[str, int]],
    seats: Sequence[Seat],
    before: set[int],
) -> tuple[Outcome, bool]:
    """Return how the job ended, and whether it was told to; signals are held back before and after."""
    children = _start(work, explain, seats)
    with _Forwarding(children) as forwarding:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        outcome = _wait(children)
        signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    if forwarding.has_killed:
        return Outcome(EXIT_INTERRUPTED, ["Interrupted."]), True
    return outcome, forwarding.was_told


def _start(
    work: Callable[[], int], explain: Callable[[BaseException], tuple[str, int]], seats: Sequence[Seat]
) -> dict[BaseProcess, Connection]:
    """Fork the processes; return them by rank, each with the end of a pipe it may say one message into."""
    context = multiprocessing.get_context("fork")
    children: dict[BaseProcess, Connection] = {}
    for seat in seats:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(work, explain, sender, seat, os.getpid()))
        child.start()
        sender.close()
        children[child] = receiver
    return children


def _child(
    work: Callable[[], int],
    explain: Callable[[BaseException], tuple[str, int]],
    sender: Connection,
    seat: Seat,
    parent: int,
) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent passes them on
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    os.environ.update(seat.environment)
    try:
        seat.enter()
        code = work()
    except BaseException as error:
        try:
            message, code = explain(error)
        except BaseException:
            sys.excepthook(type(error), error, error.__traceback__)
            message, code = "", 1
        sender.send(message[:_MESSAGE_CHARS])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no interpreter shutdown: peers' sockets may already be gone


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(1)


class _Forwarding:
    """Pass SIGTERM, SIGINT and, unless `nohup` has it ignored, SIGHUP on to the children."""

    def __init__(self, children: dict[BaseProcess, Connection]) -> None:
        self._children = children
        self._interrupts = 0
        self.was_told = False
        """Whether there was one."""

    @property
    def has_killed(self) -> bool:
        """Whether a second Ctrl-C ended the processes."""
        return self._interrupts > 1

    def __enter__(self) -> "_Forwarding":
        ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
        self._before = {s: signal.signal(s, self._forward) for s in _FORWARDED if s not in ignored}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self.was_told = True
        self._interrupts += number == signal.SIGINT
        for child in self._children:
            if child.is_alive():
                child.kill() if self.has_killed else child.terminate()


def _wait(children: dict[BaseProcess, Connection]) -> Outcome:
    messages: list[str] = []
    lost: dict[int, str] = {}
    code, running = 0, list(children)
    ranks = {child: rank for rank, child in enumerate(children)}
    while running:
        failed = code not in (0, EXIT_STOPPED)
        ready = wait([child.sentinel for child in running], timeout=_GRACE_S if failed else None)
        if not ready:  # the others had their time to stop
            for child in running:
                child.kill()
        ended = [child for child in running if child.sentinel in ready]
        for child in ended:
            child.join()  # the kernel closes the sentinel a moment before it gives out the exit code
            exit_code = child.exitcode or 0
            try:
                messages.append(children[child].recv())
            except EOFError:  # it ended without a word
                if exit_code < 0 and not failed:
                    lost[ranks[child]] = _killed(ranks[child], signal.Signals(-exit_code))
            if exit_code and code in (0, EXIT_STOPPED):  # a failure outranks a stop
                code = exit_code if exit_code > 0 else 1
            children[child].close()
        running = [child for child in running if child not in ended]
        if code not in (0, EXIT_STOPPED) and not failed:
            for child in running:
                _ask_to_stop(child)
    said = [message for message in dict.fromkeys(messages) if message]
    causes = [message for message in said if message != str(PeerLost())]
    return Outcome(code, [*lost.values(), *causes] or said, () if causes else tuple(lost))


def _ask_to_stop(child: BaseProcess) -> None:
    child.terminate()
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, signal.SIGCONT)  # one that was frozen hears nothing before it goes on


def _killed(rank: int, number: signal.Signals) -> str:
    memory = " The machine may have run out of memory: see dmesg." if number == signal.SIGKILL else ""
    return f"Rank {rank} was killed by {number.name}.{memory}"
