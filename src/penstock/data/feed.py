"""Batches ahead of their use: from threads, or from worker processes where transforms are heavy."""

from collections.abc import Callable, Generator, Iterator
from itertools import count
from typing import Any, Protocol

from penstock.data.prefetch import ahead
from penstock.data.processes import Fields, Processes
from penstock.data.run import Snapshot
from penstock.data.types import Batch

Delivered = dict[str, Any]  # Any: tensors or arrays, as the loader delivers


class Feed(Protocol):
    """Computes steps in advance; a context manager that leaves no thread or process behind."""

    def __enter__(self) -> "Feed":
        """Start."""

    def __exit__(self, *_: object) -> None:
        """End what was started."""

    def batches(self, step: int) -> Generator[Delivered]:
        """Yield the batches of a step and all that follow; called again after the loader was changed."""


class ThreadFeed:
    """Threads of this process; they live as long as one call of `batches`.

    Args:
        batch_at: what computes the batch of a step.
        depth: batches prepared in advance.
        num_workers: threads; 0 computes each batch when it is asked for.
    """

    def __init__(self, batch_at: Callable[[int], Delivered], *, depth: int, num_workers: int) -> None:
        self._batch_at, self._depth, self._num_workers = batch_at, depth, num_workers

    def __enter__(self) -> "ThreadFeed":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def batches(self, step: int) -> Generator[Delivered]:
        """Yield the batches of a step and all that follow."""
        return ahead(self._batch_at, start=step, depth=self._depth, num_workers=self._num_workers)


class Following(Protocol):
    """A loader as a worker process needs it."""

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the loader that is fed was."""

    def fields_at(self, step: int, on_sample: Callable[[int], None]) -> Fields:
        """Return the arrays of a step's batch."""


class ProcessFeed:
    """Worker processes with a copy of the loader each; they live as long as the feed.

    Args:
        loader: picklable; each process gets a copy.
        snapshot: returns the loader that is fed, as it is: it goes with every task, so that a change
            reaches the processes without starting them again.
        deliver: turns arrays into what the loader hands out.
        depth: batches prepared in advance.
        processes: how many.
        name: what messages call the transform.
    """

    def __init__(
        self,
        loader: Following,
        *,
        snapshot: Callable[[], Snapshot],
        deliver: Callable[[Batch], Delivered],
        depth: int,
        processes: int,
        name: str,
    ) -> None:
        self._snapshot, self._deliver, self._depth = snapshot, deliver, depth
        self._processes = Processes(_Steps(loader), processes=processes, name=name)

    def __enter__(self) -> "ProcessFeed":
        self._processes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def batches(self, step: int) -> Generator[Delivered]:
        """Yield the batches of a step and all that follow."""
        snapshot = self._snapshot()
        tasks: Iterator[tuple[int, Snapshot]] = ((at, snapshot) for at in count(step))
        for fields in self._processes.ordered(tasks, depth=self._depth):
            yield self._deliver(Batch(fields))


class _Steps:
    """What a worker process does: make its loader the one of the task, compute the step."""

    def __init__(self, loader: Following) -> None:
        self._loader = loader
        self._snapshot: Snapshot | None = None

    def __call__(self, task: tuple[int, Snapshot], on_sample: Callable[[int], None]) -> Fields:
        step, snapshot = task
        if snapshot != self._snapshot:
            self._loader.restore(snapshot)
            self._snapshot = snapshot
        return self._loader.fields_at(step, on_sample)
