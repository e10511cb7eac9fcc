"""Steps ahead of their use: in order, bounded, errors in their place, no thread left behind."""

import threading
from collections.abc import Callable
from contextlib import closing
from itertools import islice

import pytest

from penstock.data.feed import ahead

WORKERS = pytest.mark.parametrize(("num_workers", "depth"), [(0, 2), (1, 1), (1, 4), (3, 2), (2, 0)])


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-loader")]


@WORKERS
def test_steps_come_in_order_from_the_first(num_workers: int, depth: int) -> None:
    with closing(ahead(lambda step: step * step, start=3, depth=depth, num_workers=num_workers)) as steps:
        assert list(islice(steps, 20)) == [step * step for step in range(3, 23)]


@WORKERS
def test_an_error_is_raised_at_its_own_step_and_ends_the_threads(num_workers: int, depth: int) -> None:
    def compute(step: int) -> int:
        if step == 5:
            raise ValueError("step 5")
        return step

    steps = ahead(compute, start=0, depth=depth, num_workers=num_workers)
    assert [next(steps) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="step 5"):
        next(steps)
    assert not loader_threads()


def end_by_closing(steps) -> None:  # type: ignore[no-untyped-def]
    steps.close()


def end_by_dropping(steps) -> None:  # type: ignore[no-untyped-def]
    del steps


@pytest.mark.parametrize("end", [end_by_closing, end_by_dropping])
def test_an_iterator_that_is_left_ends_its_threads(end: Callable[[object], None]) -> None:
    holder = [ahead(lambda step: step, start=0, depth=3, num_workers=2)]
    next(holder[0])
    assert loader_threads()
    end(holder.pop())
    assert not loader_threads()


def test_no_more_than_depth_steps_are_computed_in_advance() -> None:
    started: list[int] = []
    with closing(ahead(lambda step: started.append(step), start=0, depth=3, num_workers=1)) as steps:
        for taken in range(1, 6):
            next(steps)
            assert max(started) <= taken + 1, "the step just taken was submitted with two more"
    assert started == sorted(started)


def test_without_workers_a_step_is_computed_when_it_is_asked_for() -> None:
    started: list[int] = []
    steps = ahead(lambda step: started.append(step), start=0, depth=3, num_workers=0)
    next(steps)
    assert started == [0]
    assert not loader_threads()


def test_steps_are_computed_side_by_side_and_handed_over_in_order() -> None:
    both = threading.Barrier(2, timeout=30)

    def compute(step: int) -> int:
        if step < 2:
            both.wait()  # passes only if steps 0 and 1 are under way at the same time
        return step

    with closing(ahead(compute, start=0, depth=2, num_workers=2)) as steps:
        assert list(islice(steps, 4)) == [0, 1, 2, 3]
