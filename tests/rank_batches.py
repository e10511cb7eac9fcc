"""Cases that share forked ranks: starting a rank costs as much as a tiny model's run of four steps."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from penstock.parallel.mesh import World
from penstock.testing.ranks import on_ranks

T = TypeVar("T")
_MAX_CASES = 8  # process groups, and their threads, are left to the end of the ranks


class RankBatches(Generic[T]):
    """Results of each case on its ranks; cases of as many ranks run in turn in the same processes.

    A batch runs when the first of its cases is asked for. If it fails, each of its cases runs alone:
    those that fail alone have failed, and if none does, the whole batch has. A failure always fails a test.

    Args:
        ranks: case -> number of ranks.
        work: what a rank computes for a case.
    """

    def __init__(self, ranks: Mapping[str, int], work: Callable[[str, World], T]):
        self._ranks, self._work = ranks, work
        self._results: dict[str, list[T]] = {}
        self._errors: dict[str, AssertionError] = {}

    def of(self, case: str) -> list[T]:
        """Return the results of a case, by rank.

        Raises:
            AssertionError: a rank failed.
        """
        if case not in self._results | self._errors:
            self._run_batch(self._batch_of(case))
        if case in self._errors:
            raise self._errors[case]
        return self._results[case]

    def _run_batch(self, cases: list[str]) -> None:
        try:
            self._run(cases)
        except AssertionError as error:
            alone = {case: own for case in cases if (own := self._error_alone(case))}
            self._errors |= alone or dict.fromkeys(cases, error)

    def _error_alone(self, case: str) -> AssertionError | None:
        try:
            self._run([case])
        except AssertionError as error:
            return error
        return None

    def _batch_of(self, case: str) -> list[str]:
        same_ranks = [other for other, ranks in self._ranks.items() if ranks == self._ranks[case]]
        first = same_ranks.index(case) // _MAX_CASES * _MAX_CASES
        return same_ranks[first : first + _MAX_CASES]

    def _run(self, cases: list[str]) -> None:
        def in_turn(world: World) -> list[T]:
            return [self._work(case, world) for case in cases]

        by_rank = on_ranks(in_turn, ranks=self._ranks[cases[0]])
        self._results |= dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))


def import_compiler() -> None:
    """Let the compiler import what it needs here, once, and not in each rank that is forked."""
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2))
    torch.compiler.reset()
