"""Steps of epochs: they read every row of the epochs, and not a step more."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import Loader
from penstock.data.schedule.change_log import Change
from penstock.testing.corpora import write_corpus
from tests.examples import examples


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = [3, 11, 7, 2, 9, 5] * 9
    return write_corpus(tmp_path_factory.mktemp("epochs") / "c", [[1] * n for n in lengths], vocab_size=9)


def epochs_of(loader: Loader, steps: range) -> list[np.ndarray]:
    """Return the epoch of each row of some steps."""
    index = loader._run.sample_index
    return [index.addresses(index.locate(loader.samples_of(step)))[1].epoch for step in steps]


@examples(40)
@given(
    packing=st.sampled_from(["best_fit", "concat", "whole"]),
    epochs=st.integers(1, 4),
    rows=st.integers(1, 9),
    changes=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from([None, 1, 4]), st.sampled_from([None, 12, 24])),
        max_size=2,
        unique_by=lambda change: change[0],
    ),
)
def test_the_steps_of_epochs_read_all_their_rows_and_end_with_the_last(
    corpus: Path, packing: str, epochs: int, rows: int, changes: list[tuple[int, int | None, int | None]]
) -> None:
    schedule = [
        Change(step=step, global_batch_size=size, sequence_length=length)
        for step, size, length in sorted(changes)
        if size or length
    ]
    loader = Loader(
        {"c": corpus},
        sequence_length=16,
        global_batch_size=rows,
        packing=packing,
        overlong="truncate" if packing == "whole" else None,
        schedule=schedule,
        deliver="numpy",
    )
    steps = loader.steps_of_epochs(epochs)
    *_, last = epochs_of(loader, range(steps))
    assert last.min() < epochs
    assert min(found.min() for found in epochs_of(loader, range(steps, steps + 9))) >= epochs
