"""Compute steps ahead of their use, in threads, and hand them over in order.

Threads, because gathering tokens releases the interpreter lock and a batch crosses to the training
loop without a copy; a worker process costs more to hand a batch over than this loader to make it.
"""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(compute: Callable[[int], T], *, start: int, depth: int, num_workers: int) -> Generator[T]:
    """Yield compute(start), compute(start + 1), ... for ever; at most `depth` of them in advance.

    An error in `compute` is raised at the step it belongs to, after the steps before it. Closing the
    iterator waits for the steps under way and ends the threads.

    Args:
        num_workers: threads; 0 computes each step when it is asked for.
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
