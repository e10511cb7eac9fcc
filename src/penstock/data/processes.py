"""Compute batches in worker processes, in order: for transforms too heavy for the loader's threads.

Each worker holds a copy of one function and gets every n-th task, so which worker does what is fixed, and
results come back in the order of the tasks. Arrays cross a pipe as bytes (about a gigabyte a second each
way), which pays when a batch costs more to transform than to copy. Workers are spawned, not forked: the
training process may have threads. They ignore Ctrl-C, which is their parent's to handle, and end with it,
however it ends.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.core.errors import PenstockError, TransformError
from penstock.data.types import Int32, Int64

Task = TypeVar("Task")
Fields = dict[str, Int64 | Int32]
Compute = Callable[[Task, Callable[[int], None]], Fields]
"""(task, on_sample) -> arrays; it calls `on_sample` with each sample id before it works on it."""

_GRACE_S = 5.0
_NO_SAMPLE = -1


class Processes(Generic[Task]):
    """Worker processes that answer tasks in order; a context manager that leaves none behind.

    Args:
        compute: picklable; sent to each worker once.
        processes: how many, at least 1.
        name: what messages call the work, the transform's name.

    Raises:
        TransformError: on entering, when `compute` cannot be pickled.
    """

    def __init__(self, compute: Compute[Task], *, processes: int, name: str) -> None:
        self._compute, self._processes, self._name = compute, processes, name
        self._workers: list[_Worker] = []
        self._owed: deque[_Worker] = deque()

    def __enter__(self) -> "Processes[Task]":
        try:
            work = pickle.dumps(self._compute)
        except Exception as error:
            raise TransformError(
                f"Transform {self._name!r} cannot be sent to worker processes: {error}",
                fix="Define it at the top of a module; a lambda or an inner function cannot be sent.",
            ) from error
        # Started first: on its start it would undo the blocking of Ctrl-C below.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # inherited by the workers
        try:
            self._workers = [_Worker(work) for _ in range(self._processes)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, whatever they are doing."""
        workers, self._workers = self._workers, []
        self._owed.clear()
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()

    def ordered(self, tasks: Iterator[Task], *, depth: int) -> Generator[Fields]:
        """Yield the result of each task, in order; every worker has one, or `depth` are under way in all.

        An error is raised at the task it belongs to. What an earlier, unfinished call left under way is
        waited for and dropped.

        Raises:
            TransformError: a worker process ended; the message has the sample it worked on.
            PenstockError: what the task raised.
        """
        while self._owed:
            self._answer(self._owed.popleft())
        depth, turn = max(depth, len(self._workers)), 0
        exhausted = False
        while True:
            while not exhausted and len(self._owed) < depth:
                try:
                    task = next(tasks)
                except StopIteration:
                    exhausted = True
                    break
                worker = self._workers[turn % len(self._workers)]
                turn += 1
                self._owed.append(worker)
                self._ask(worker, task)
            if not self._owed:
                return
            answer = self._answer(self._owed.popleft())
            if isinstance(answer, PenstockError):
                raise answer
            yield answer

    def _ask(self, worker: "_Worker", task: Task) -> None:
        # A worker that is gone is reported when its answer is due: what was computed before comes first.
        with suppress(BrokenPipeError, ConnectionResetError):
            worker.pipe.send(task)

    def _answer(self, worker: "_Worker") -> Fields | PenstockError:
        try:
            return _receive(worker.pipe)
        except (EOFError, ConnectionResetError):
            raise self._death_of(worker) from None

    def _death_of(self, worker: "_Worker") -> TransformError:
        """Return the error of a worker that is gone."""
        worker.process.join()
        code = worker.process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        if worker.current.value == _NO_SAMPLE:
            return TransformError(
                f"A worker process of transform {self._name!r} {how} before its first sample",
                fix="See what it printed. Worker processes import the main module: keep what it does under "
                "`if __name__ == '__main__':`.",
            )
        return TransformError(
            f"A worker process of transform {self._name!r} {how} at sample {worker.current.value}",
            fix="See what it printed. If the system killed it for its memory, use fewer processes.",
        )


class _Worker:
    """A process, our end of its pipe, and the sample it works on (shared memory without a name)."""

    def __init__(self, work: bytes) -> None:
        context = multiprocessing.get_context("spawn")
        self.current: Any = context.RawValue("q", _NO_SAMPLE)  # Any: ctypes
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=_serve, args=(theirs, self.current, work), daemon=True, name="penstock-transform"
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        """Wait for the process, which was told to end."""
        self.process.join(_GRACE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()
        self.pipe.close()


def _serve(pipe: "Connection[Any, Any]", current: Any, work: bytes) -> None:  # Any: tasks; ctypes
    """Answer tasks until the parent closes the pipe or ends: the main function of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def on_sample(sample_id: int) -> None:
        current.value = sample_id

    compute: Compute[Any] | None = None
    with suppress(EOFError, ConnectionError):  # the parent closed the pipe, or is gone
        while True:
            task = pipe.recv()
            try:
                compute = compute or pickle.loads(work)
                answer: Fields | PenstockError = compute(task, on_sample)
            except Exception as error:
                answer = _as_ours(error)
            _send(pipe, answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)  # in the middle of a transform: nobody is left to take its result


def _as_ours(error: Exception) -> PenstockError:
    """Return an error that can cross the pipe, with the traceback of this process as a note."""
    where = "".join(traceback.format_exception(error))
    if not isinstance(error, PenstockError):
        error = TransformError(f"A worker process failed with {type(error).__name__}: {error}")
    error.add_note(f"In the worker process:\n{where}")
    error.__cause__ = None  # it is in the note, and need not be picklable
    return error


def _send(pipe: "Connection[Any, Any]", answer: Fields | PenstockError) -> None:
    if isinstance(answer, PenstockError):
        pipe.send(answer)
        return
    pipe.send([(name, array.dtype.str, array.shape) for name, array in answer.items()])
    for array in answer.values():
        pipe.send_bytes(np.ascontiguousarray(array).data)


def _receive(pipe: "Connection[Any, Any]") -> Fields | PenstockError:
    head = pipe.recv()
    if isinstance(head, PenstockError):
        return head
    fields: Fields = {}
    for name, dtype, shape in head:
        fields[name] = np.empty(shape, dtype)
        pipe.recv_bytes_into(fields[name].data.cast("B"))
    return fields
