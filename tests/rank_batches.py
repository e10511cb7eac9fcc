"""Cases that share forked ranks: starting a rank costs as much as a tiny model's run of four steps."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

from penstock.parallel.mesh import World
from penstock.testing.ranks import on_ranks

T = TypeVar("T")
_MAX_CASES = 8  # process groups and their threads live until the ranks exit


class RankBatches(Generic[T]):
    """Runs cases with the same number of ranks in the same forked processes, up to eight a batch.

    A batch runs at the first request for one of its cases. If a case fails, the whole batch fails, and the
    error names the case. It is not run again, because it would find the folders that it left.

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
            self._errors |= dict.fromkeys(cases, error)

    def _batch_of(self, case: str) -> list[str]:
        same_ranks = [other for other, ranks in self._ranks.items() if ranks == self._ranks[case]]
        first = same_ranks.index(case) // _MAX_CASES * _MAX_CASES
        return same_ranks[first : first + _MAX_CASES]

    def _run(self, cases: list[str]) -> None:
        def in_turn(world: World) -> list[T]:
            return [self._run_case(case, world) for case in cases]

        by_rank = on_ranks(in_turn, ranks=self._ranks[cases[0]])
        self._results |= dict(zip(cases, map(list, zip(*by_rank, strict=True)), strict=True))

    def _run_case(self, case: str, world: World) -> T:
        try:
            return self._work(case, world)
        except Exception as error:
            raise AssertionError(f"Case {case!r}: {type(error).__name__}: {error}") from error


def import_compiler() -> None:
    """Let the compiler import what it needs here, once, and not in each rank that is forked."""
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2))
    torch.compiler.reset()
