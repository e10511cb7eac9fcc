"""The loader as a training loop sees it: states, iterators, threads (its laws are property tests)."""

import gc
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data import Loader
from penstock.testing.corpora import numbered_corpus
from tests.loaders import WORKERS, Make, ids, penstock_threads, steps, take


@WORKERS
def test_the_state_counts_batches_handed_out_and_not_those_prepared(make: Make, num_workers: int) -> None:
    loader = make(num_workers=num_workers, prefetch=5)
    batches = iter(loader)
    for step in range(1, 4):
        assert sorted(ids(next(batches))) == steps(step - 1, step)[0]
        state = loader.state_dict()
        assert (loader.step, state["step"], state["samples"]) == (step, step, 4 * step)
    batches.close()


@WORKERS
def test_a_state_loaded_in_the_middle_of_an_iteration_takes_effect_at_the_next_batch(
    make: Make, num_workers: int
) -> None:
    loader = make(num_workers=num_workers, prefetch=3)
    batches = iter(loader)
    found = [sorted(ids(next(batches))) for _ in range(5)]
    early = make()
    take(early, 2)
    loader.load_state_dict(early.state_dict())
    found += [sorted(ids(next(batches))) for _ in range(3)]
    batches.close()
    assert found == steps(0, 5) + steps(2, 5)


@WORKERS
def test_a_state_of_the_same_step_loaded_in_mid_iteration_changes_nothing(
    make: Make, num_workers: int
) -> None:
    loader = make(num_workers=num_workers)
    batches = iter(loader)
    found = []
    for _ in range(6):
        found.append(sorted(ids(next(batches))))
        loader.load_state_dict(loader.state_dict())
    batches.close()
    assert found == steps(0, 6)


def test_an_error_prepared_for_a_step_that_a_loaded_state_has_left_behind_is_not_raised(make: Make) -> None:
    loader = make(num_workers=1, prefetch=3, epochs={"web": 1}, global_batch_size=1)
    start, last = loader.state_dict(), loader.num_samples
    assert last is not None
    batches = iter(loader)
    for _ in range(last):
        next(batches)
    loader.load_state_dict(start)
    assert ids(next(batches)) == [0]
    batches.close()


@WORKERS
def test_two_iterators_share_one_count_and_neither_repeats_nor_loses_a_sample(
    make: Make, num_workers: int
) -> None:
    loader = make(num_workers=num_workers)
    one, two = iter(loader), iter(loader)
    found = [ids(next(batches)) for batches in (one, two, two, one, one, two, one)]
    assert [sorted(batch) for batch in found] == steps(0, 7)
    one.close()
    two.close()


@WORKERS
def test_a_new_iterator_continues(make: Make, num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    found = [sorted(batch) for _ in range(3) for batch in take(loader, 2)]
    assert found == steps(0, 6)


def test_a_batch_can_be_read_again_without_moving_the_loader(make: Make) -> None:
    loader = make()
    served = next(iter(loader))
    again = loader.batch_at(0)
    assert all((served[name] == again[name]).all() for name in served)
    assert loader.step == 1


def test_a_state_can_be_changed_without_changing_the_loader(make: Make) -> None:
    loader = make()
    loader.state_dict()["corpora"]["web"]["T"] = 0
    loader.load_state_dict(make().state_dict())


def test_a_loader_continues_a_state_with_its_own_batch_size_if_asked_for(make: Make) -> None:
    loader = make()
    take(loader, 3)
    larger = make(global_batch_size=6)
    larger.load_state_dict(json.loads(json.dumps(loader.state_dict())), on_change="apply")
    assert sorted(take(larger, 1)[0]) == list(range(12, 18))
    assert larger.state_dict()["batch"] == [[0, 4], [3, 6]]
    assert larger.samples_of(2).tolist() == list(range(8, 12))
    assert larger.samples_of(4).tolist() == list(range(18, 24))


@pytest.mark.parametrize("leave", ["close", "drop"])
def test_leaving_an_iteration_ends_its_threads(make: Make, leave: str) -> None:
    batches: Iterator[Any] | None = iter(make(num_workers=2, prefetch=4))
    assert batches is not None
    next(batches)
    assert penstock_threads()
    if leave == "close":
        batches.close()  # type: ignore[attr-defined]
    batches = None
    gc.collect()
    assert not penstock_threads()


def test_other_weights_and_lengths_of_a_resumed_loader_hold_from_there_on_if_asked_for(
    make: Make, corpus: Path
) -> None:
    both = {"web": corpus, "other": numbered_corpus(corpus.parent / "other", [9] * 50)}
    saved = make(corpora=both, weights={"web": 1, "other": 1})
    take(saved, 3)
    resumed = make(corpora=both, weights={"web": 3, "other": 1}, sequence_length=8)
    resumed.load_state_dict(saved.state_dict(), on_change="apply")
    assert resumed.weights == {"web": 0.75, "other": 0.25}
    assert resumed.batch_at(2)["input_ids"].shape == (4, 16)
    assert resumed.batch_at(3)["input_ids"].shape == (4, 8)
    assert resumed.samples_by_corpus(3) == {"web": 6, "other": 6}
    assert resumed.samples_by_corpus(7) == {"web": 6 + 12, "other": 6 + 4}
    assert resumed.tokens_by_corpus(7) == {"web": 6 * 16 + 12 * 8, "other": 6 * 16 + 4 * 8}


def test_a_corpus_that_was_moved_is_the_same_corpus(make: Make, corpus: Path) -> None:
    loader = make()
    take(loader, 2)
    moved = make(corpora={"web": corpus.rename(corpus.parent / "elsewhere")})
    moved.load_state_dict(loader.state_dict())
    assert sorted(take(moved, 1)[0]) == steps(2, 3)[0]


@pytest.mark.parametrize("prefetch", [0, 1, 7])
@WORKERS
def test_workers_and_prefetching_change_nothing(make: Make, num_workers: int, prefetch: int) -> None:
    plain = make()
    loader = make(num_workers=num_workers, prefetch=prefetch)
    for step, batch in enumerate(islice(loader, 12)):
        expected = plain.batch_at(step)
        assert all((batch[name] == expected[name]).all() for name in expected)


def test_numpy_integers_are_plain_ones_in_the_state(tmp_path):
    corpora = {"c": numbered_corpus(tmp_path, [9] * 40)}
    sizes = {"sequence_length": np.int64(4), "global_batch_size": np.int32(4), "seed": np.int64(3)}
    assert json.loads(json.dumps(Loader(corpora, **sizes).state_dict()))["length"] == [[0, 4]]
