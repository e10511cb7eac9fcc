"""Sample index: threads that extend schedules, schedules built on first use, stable numbers of corpora."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock.data import Loader
from penstock.data.schedule.change_log import Change
from penstock.testing.corpora import numbered_corpus
from tests.growing import finish, grow, streamed_corpus

PLAIN = {"sequence_length": 8, "global_batch_size": 4, "num_workers": 0, "deliver": "numpy"}


def test_threads_that_reach_a_streamed_corpus_at_once_read_the_same(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [9] * 5)
    for _ in range(6):
        grow(folder, [9] * 5)
    finish(folder)
    expected = [Loader({"c": folder}, **PLAIN).batch_at(step)["input_ids"].tolist() for step in range(20)]
    for _ in range(5):
        loader = Loader({"c": folder}, **PLAIN)
        with ThreadPoolExecutor(8) as workers:
            found = workers.map(
                lambda step, at=loader: at.batch_at(step)["input_ids"].tolist(), range(19, -1, -1)
            )
            assert list(found) == expected[::-1]


def test_a_planned_length_of_a_streamed_corpus_waits_for_nothing_before_its_step(tmp_path: Path) -> None:
    folder = streamed_corpus(tmp_path / "s", [9] * 5)
    loader = Loader({"c": folder}, schedule=[Change(step=10**6, sequence_length=16)], **PLAIN)
    assert loader.batch_at(0)["input_ids"].shape == (4, 8)
    assert loader.samples_per_epoch == {"c": 6}
    assert loader.num_samples is None
    assert loader.state_dict()["corpora"]["c"]["parts"] == 0


@pytest.mark.parametrize("order", [("web", "code"), ("code", "web")])
def test_rows_of_a_resumed_batch_lie_as_before_in_whatever_order_corpora_are_given(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    corpora = {name: numbered_corpus(tmp_path / name, [30] * 20) for name in ("web", "code")}
    saved = Loader(corpora, **PLAIN)
    loader = Loader({name: corpora[name] for name in order}, **PLAIN)
    loader.load_state_dict(saved.state_dict())
    for step in range(5):
        assert (loader.batch_at(step)["input_ids"] == saved.batch_at(step)["input_ids"]).all()
        ids = np.sort(saved.samples_of(step))
        names = [order[index] for index in loader.corpora_of(ids).tolist()]
        assert names == [("web", "code")[index] for index in saved.corpora_of(ids).tolist()]
