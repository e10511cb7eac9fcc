"""Prefetch: compute batches ahead of their use, in threads, and yield them in order.

Threads, because gathering tokens releases the interpreter lock and a batch reaches the training loop without
a copy; handing a batch over from a worker process costs more than making it. Transforms that cost more than
that run in the processes of a DataLoader over `loader.stream()`.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(compute: Callable[[int], T], *, start: int, depth: int, num_workers: int) -> Generator[T]:
    """Yield compute(start), compute(start + 1), ... without end, at most `depth` of them computed ahead.

    An error in `compute` is raised at the step it belongs to, after the steps before it. Closing the iterator
    waits for the steps in progress and ends the threads.

    Args:
        num_workers: threads; 0 computes each step when it is requested.
    """
    if not num_workers or not depth:
        while True:
            yield compute(start)
            start += 1
    workers = ThreadPoolExecutor(num_workers, thread_name_prefix="penstock-loader")
    pending: deque[Future[T]] = deque()
    try:
        while True:
            while len(pending) < depth:
                pending.append(workers.submit(compute, start + len(pending)))
            yield pending.popleft().result()
            start += 1
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
