"""What a loader answers about its steps and its corpora."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.core.errors import UsageError
from penstock.data import Loader
from penstock.data.schedule.change_log import Change
from penstock.testing.corpora import write_corpus
from tests.loaders import run

Make = Callable[..., Loader]


def test_the_rows_of_an_epoch_are_those_at_the_present_length_not_a_planned_one(mix: Make) -> None:
    loader = mix("web", schedule=[Change(step=2, sequence_length=16)])
    assert loader.samples_per_epoch == {"web": 75}
    assert run(loader, 2).samples_per_epoch == {"web": 38}


def test_samples_of_two_lengths_are_gathered_apart_but_explained_together(mix: Make) -> None:
    loader = run(mix(), 2)
    loader.set_sequence_length(16)
    with pytest.raises(UsageError, match=r"different sequence lengths \(got \[8, 16\]\)"):
        loader.gather(np.array([0, 8]))
    rows = loader.explain(np.array([8, 0]))
    assert [sum(piece.tokens for piece in row) for row in rows] == [16, 8]


def test_the_supply_ends_at_the_first_sample_that_is_asked_for_and_not_there(mix: Make) -> None:
    loader = mix(epochs={"web": 1}, weights={"web": 1, "code": 1}, global_batch_size=1)
    last = loader.num_samples
    assert last is not None
    loader.skip(samples=range(last - 3, last + 4))
    assert loader.num_samples is not None
    assert loader.num_samples >= last + 4, "what is skipped need not be there"
    loader.set_weights({"web": 0, "code": 1})
    assert loader.num_samples is None


@pytest.mark.parametrize("weight", [1e-9, 1e-300])
def test_a_tiny_weight_is_served_as_rarely_as_it_says(mix: Make, weight: float) -> None:
    loader = mix(weights={"web": 1, "code": weight})
    for step in (2**16, 10**9, 10**13):
        assert loader.samples_by_corpus(step)["code"] == pytest.approx(4 * step * weight, abs=2)


def test_a_thousand_corpora_are_one_mixture(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [[1, 2, 3, 4, 5]])
    corpora = {f"c{number}": corpus for number in range(1000)}
    plain = {"sequence_length": 4, "num_workers": 0, "deliver": "numpy"}
    loader = Loader(corpora, weights=dict.fromkeys(corpora, 1e-9), global_batch_size=1000, **plain)
    assert set(loader.samples_by_corpus(1).values()) == {1}
    assert loader.batch_at(10**9)["input_ids"].shape == (1000, 4)
