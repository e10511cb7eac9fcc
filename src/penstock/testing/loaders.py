"""A conformance kit for training data loaders, Penstock's or any other.

Four promises, each a function that raises AssertionError with counts of tokens lost and repeated:

    assert_exactly_once     one pass serves every token of the corpus once
    assert_resumable        saved and opened again, the batches that follow are the same
    assert_rescalable       ... on other numbers of ranks, one pass is still every token once
    assert_bounded_state    the state does not grow with what was served, and is small

A loader takes part through a `LoaderAdapter` of four methods; loader_adapters.py has two. Give it a corpus
in which every token says which it is (`penstock.testing.corpora.numbered_corpus`). All ranks run in one
process, a batch each in turn, and states go through pickle, as through a checkpoint.
"""

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy.typing as npt

from penstock.testing.token_tally import first_difference, joined, tally


class LoaderAdapter(Protocol):
    """How the kit drives a loader."""

    def open(self, rank: int, world_size: int, num_workers: int, states: Sequence[Any] | None = None) -> Any:
        """Open one rank's loader; Any: whatever the other methods take.

        Args:
            states: what `save` returned on each rank, in rank order, of a job that may have had another
                number of ranks; None: start at the beginning.
        """

    def next(self, loader: Any) -> npt.ArrayLike:
        """Return the identities of the tokens of the next batch, padding left out.

        Raises:
            StopIteration: at the end of one pass over the corpus.
        """

    def save(self, loader: Any) -> Any:
        """Return the state after the batches handed out so far; it must be picklable."""

    def close(self, loader: Any) -> None:
        """End the loader's threads and processes."""


def assert_exactly_once(
    adapter: LoaderAdapter, expected: npt.ArrayLike, *, world_size: int = 1, num_workers: int = 0
) -> None:
    """Refuse a loader whose ranks do not serve the expected tokens once each in one pass.

    Args:
        expected: identities of all tokens of the corpus, in any order.
    """
    limit = 2 * len(joined([expected]))
    with _open(adapter, world_size, num_workers) as job:
        served = job.rest(limit)
    _check_pass(expected, served, f"In one pass on {world_size} ranks with {num_workers} workers each")


def assert_resumable(
    adapter: LoaderAdapter,
    *,
    world_size: int = 1,
    num_workers: int = 0,
    at: Sequence[int] = (0, 1, 5),
    batches: int = 8,
) -> None:
    """Refuse a loader that goes on otherwise after it was saved and opened again, or because it was saved.

    Args:
        at: batches each rank has taken when it is saved.
        batches: how many are compared afterwards.
    """
    with _open(adapter, world_size, num_workers) as job:
        whole = job.take(max(at) + batches)
    for point in at:
        wanted = [rank[point : point + batches] for rank in whole]
        with _open(adapter, world_size, num_workers) as job:
            job.take(point)
            states = job.save()
            _check_same(wanted, job.take(batches), f"After saving at batch {point} and going on")
        with _open(adapter, world_size, num_workers, states) as job:
            _check_same(wanted, job.take(batches), f"After saving at batch {point} and opening again")


def assert_rescalable(
    adapter: LoaderAdapter,
    expected: npt.ArrayLike,
    *,
    world_sizes: Sequence[int] = (4, 2, 3, 1),
    num_workers: Sequence[int] = (0,),
    batches: int = 2,
) -> None:
    """Refuse a loader that loses or repeats tokens of one pass when the number of ranks changes.

    Args:
        expected: identities of all tokens of the corpus, in any order.
        world_sizes: ranks of each phase; the last goes on to the end of the pass.
        num_workers: workers of each phase, over and over.
        batches: how many each rank takes in a phase.
    """
    served: list[npt.ArrayLike] = []
    limit = 2 * len(joined([expected]))
    states: list[Any] | None = None  # Any: the loader's own
    for phase, world_size in enumerate(world_sizes):
        with _open(adapter, world_size, num_workers[phase % len(num_workers)], states) as job:
            if phase == len(world_sizes) - 1:
                served += job.rest(limit)
            else:
                served += [batch for rank in job.take(batches) for batch in rank]
                states = job.save()
    route = " -> ".join(map(str, world_sizes))
    _check_pass(expected, served, f"In one pass on {route} ranks, {batches} batches before each change")


def assert_bounded_state(
    adapter: LoaderAdapter,
    *,
    world_size: int = 1,
    num_workers: int = 0,
    batches: int = 100,
    limit_bytes: int = 65_536,
    growth_bytes: int = 256,
) -> None:
    """Refuse a loader whose state of one rank is large, or larger in the second half than in the first.

    Args:
        batches: how many are served, fewer if the pass ends before.
        limit_bytes: the largest pickled state of one rank that is accepted.
        growth_bytes: by how much it may grow; counts become longer as they are counted.
    """
    sizes: list[int] = []
    with _open(adapter, world_size, num_workers) as job:
        for _ in range(batches):
            if not any(job.take(1)):
                break
            sizes.append(max(len(pickle.dumps(state)) for state in job.save()))
    assert sizes, "The loader serves nothing."
    largest = max(sizes)
    assert largest <= limit_bytes, f"The state of a rank has {largest:,} bytes; {limit_bytes:,} are allowed."
    early, late = max(sizes[: (len(sizes) + 1) // 2]), max(sizes[len(sizes) // 2 :])
    assert late <= early + growth_bytes, (
        f"The state of a rank grew from {early:,} to {late:,} bytes over {len(sizes):,} batches."
    )


class _Job:
    """All ranks of a job, opened."""

    def __init__(self, adapter: LoaderAdapter, loaders: list[Any]) -> None:
        self._adapter, self._loaders = adapter, loaders
        self._ended = [False] * len(loaders)

    def take(self, batches: int) -> list[list[npt.ArrayLike]]:
        """Return up to so many batches of each rank, by rank."""
        taken: list[list[npt.ArrayLike]] = [[] for _ in self._loaders]
        for _ in range(batches):
            for rank, loader in enumerate(self._loaders):
                if not self._ended[rank]:
                    try:
                        taken[rank].append(self._adapter.next(loader))
                    except StopIteration:
                        self._ended[rank] = True
        return taken

    def rest(self, limit: int) -> list[npt.ArrayLike]:
        """Return the batches up to the end of the pass; refuse more than `limit` tokens."""
        served: list[npt.ArrayLike] = []
        count = 0
        while not all(self._ended):
            taken = [batch for rank in self.take(1) for batch in rank]
            served += taken
            count += len(joined(taken))
            assert count <= limit, (
                f"The pass has not ended after {count:,} tokens, twice the corpus. The adapter's `next` must "
                "raise StopIteration at the end of one pass."
            )
        return served

    def save(self) -> list[Any]:
        """Return the states of all ranks, as a checkpoint would give them back."""
        saved: list[Any] = pickle.loads(pickle.dumps([self._adapter.save(each) for each in self._loaders]))
        return saved


@contextmanager
def _open(
    adapter: LoaderAdapter, world_size: int, num_workers: int, states: Sequence[Any] | None = None
) -> Iterator[_Job]:
    loaders: list[Any] = []
    try:
        loaders += (adapter.open(rank, world_size, num_workers, states) for rank in range(world_size))
        yield _Job(adapter, loaders)
    finally:
        for loader in loaders:
            adapter.close(loader)


def _check_pass(expected: npt.ArrayLike, served: Sequence[npt.ArrayLike], where: str) -> None:
    found = tally(expected, joined(served))
    assert not found, f"{where}: {found}, of {len(joined([expected])):,}."


def _check_same(wanted: list[list[npt.ArrayLike]], found: list[list[npt.ArrayLike]], where: str) -> None:
    for rank, (ours, theirs) in enumerate(zip(wanted, found, strict=True)):
        wrong = first_difference(ours, theirs)
        if wrong is not None:
            everything = [joined(batch for rank in side for batch in rank) for side in (wanted, found)]
            raise AssertionError(
                f"{where}: {tally(*everything)} in the next {max(map(len, wanted))} batches; the first wrong "
                f"one is batch {wrong} of rank {rank}, counted from there."
            )
