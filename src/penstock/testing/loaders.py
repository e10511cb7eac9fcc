"""Conformance kit for training data loaders: detects lost, repeated and misplaced tokens.

Four properties, each tested by a function that raises AssertionError with the number of lost and repeated
tokens:

    assert_exactly_once     one pass serves every token of the corpus once
    assert_resumable        after saving and reopening, the following batches are the same
    assert_rescalable       ... on other numbers of ranks, one pass still serves every token once
    assert_bounded_state    the state is small and does not grow with the number of batches

A loader is tested through a `LoaderAdapter` of four methods; loader_adapters.py has two. Use a corpus in
which every token identifies its position (`penstock.testing.corpora.numbered_corpus`). All ranks run in one
process, a batch each in turn, and states are pickled, as in a checkpoint.
"""

import pickle
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.arrays import Int64


class LoaderAdapter(Protocol):
    """Interface through which the kit drives a loader."""

    def open(self, rank: int, world_size: int, num_workers: int, states: Sequence[Any] | None = None) -> Any:
        """Open one rank's loader; Any: passed to the other methods.

        Args:
            states: results of `save` on each rank, in rank order, of a job that may have had another number
                of ranks; None: start at the beginning.
        """

    def next(self, loader: Any) -> npt.ArrayLike:
        """Return the identities of the tokens of the next batch, without padding.

        Raises:
            StopIteration: at the end of one pass over the corpus.
        """

    def save(self, loader: Any) -> Any:
        """Return the state after the batches returned so far; it must be picklable."""

    def close(self, loader: Any) -> None:
        """End the loader's threads and processes."""


def assert_exactly_once(
    adapter: LoaderAdapter, expected: npt.ArrayLike, *, world_size: int = 1, num_workers: int = 0
) -> None:
    """Fail if the ranks do not serve each expected token exactly once in one pass.

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
    """Fail if a loader continues differently after saving and reopening, or because of saving.

    Args:
        at: number of batches that each rank has taken when it is saved.
        batches: number of batches compared afterwards.
    """
    with _open(adapter, world_size, num_workers) as job:
        whole = job.take(max(at) + batches)
    for point in at:
        wanted = [rank[point : point + batches] for rank in whole]
        with _open(adapter, world_size, num_workers) as job:
            job.take(point)
            states = job.save()
            _check_same(wanted, job.take(batches), f"After saving at batch {point} and resuming")
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
    """Fail if a loader loses or repeats tokens of one pass when the number of ranks changes.

    Args:
        expected: identities of all tokens of the corpus, in any order.
        world_sizes: number of ranks of each phase; the last continues to the end of the pass.
        num_workers: number of workers of each phase, repeated cyclically.
        batches: number of batches that each rank takes in a phase.
    """
    served: list[npt.ArrayLike] = []
    limit = 2 * len(joined([expected]))
    states: list[Any] | None = None  # Any: depends on the loader
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
    """Fail if a loader's state of one rank is large, or larger in the second half than in the first.

    Args:
        batches: number of batches, fewer if the pass ends before.
        limit_bytes: maximum size of the pickled state of one rank.
        growth_bytes: tolerated growth; counts get longer as they increase.
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
    """Loaders of all ranks of a job."""

    def __init__(self, adapter: LoaderAdapter, loaders: list[Any]) -> None:
        self._adapter, self._loaders = adapter, loaders
        self._ended = [False] * len(loaders)

    def take(self, batches: int) -> list[list[npt.ArrayLike]]:
        """Return up to `batches` batches of each rank, by rank."""
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
        """Return the states of all ranks after pickling, as a checkpoint would."""
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


@dataclass(frozen=True, slots=True)
class TokenTally:
    """Difference between two multisets of token identities."""

    lost: int
    """Number of expected tokens not served, counted with multiplicity."""
    repeated: int
    """Number of expected tokens served too often, counted with multiplicity."""
    foreign: int
    """Number of served tokens that were not expected."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.repeated or self.foreign)

    def __str__(self) -> str:
        foreign = f", and {self.foreign:,} served that were not expected" if self.foreign else ""
        return f"{self.lost:,} tokens lost and {self.repeated:,} repeated{foreign}"


def joined(arrays: Iterable[npt.ArrayLike]) -> Int64:
    """Return the identities of several batches as one array [n] int64."""
    flat = [np.asarray(array, dtype=np.int64).ravel() for array in arrays]
    return np.concatenate([np.zeros(0, dtype=np.int64), *flat])


def tally(expected: npt.ArrayLike, served: npt.ArrayLike) -> TokenTally:
    """Return the difference between served and expected tokens; their order does not matter.

    >>> str(tally([1, 2, 3], [1, 1, 3, 9]))
    '1 tokens lost and 1 repeated, and 1 served that were not expected'
    """
    wanted, found = joined([expected]), joined([served])
    names, place = np.unique(np.concatenate((wanted, found)), return_inverse=True)
    should = np.bincount(place[: len(wanted)], minlength=len(names))
    did = np.bincount(place[len(wanted) :], minlength=len(names))
    known = should > 0
    return TokenTally(
        lost=int((should - did).clip(min=0).sum()),
        repeated=int((did - should)[known].clip(min=0).sum()),
        foreign=int(did[~known].sum()),
    )


def first_difference(expected: Sequence[npt.ArrayLike], served: Sequence[npt.ArrayLike]) -> int | None:
    """Return the index of the first batch that differs from the expected one; None if all are equal."""
    for number, (ours, theirs) in enumerate(zip(expected, served, strict=False)):
        if not np.array_equal(np.asarray(ours), np.asarray(theirs)):
            return number
    return None if len(expected) == len(served) else min(len(expected), len(served))
