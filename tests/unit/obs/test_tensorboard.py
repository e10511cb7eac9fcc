"""The TensorBoard sink, read back by TensorBoard's own reader; and what is said where a client is missing."""

import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.core.errors import PenstockError
from penstock.obs.sinks.tensorboard import TensorBoard
from penstock.obs.sinks.wandb import WeightsAndBiases


def step(number, **values):
    return {"step": number, "loss": 7.0 - number, "corpus_tokens": {"web": 10 * number}, **values}


def read(folder):
    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_every_number_of_a_record_is_a_scalar_of_its_step(tmp_path):
    with TensorBoard(tmp_path, done=0) as sink:
        sink({"event": "start", "step": 0, "ranks": 2, "time": "now"})
        sink(step(1))
        sink(step(2))
        sink({"step": 2, "validation_loss": 6.5})
    assert read(tmp_path) == {
        "loss": [(1, 6.0), (2, 5.0)],
        "corpus_tokens/web": [(1, 10.0), (2, 20.0)],
        "validation_loss": [(2, 6.5)],
    }


def test_a_run_that_resumes_takes_back_what_it_had_not_saved(tmp_path):
    with TensorBoard(tmp_path, done=0) as sink:
        for number in (1, 2, 3):
            sink(step(number))
    with TensorBoard(tmp_path, done=1) as sink:
        sink(step(2, loss=4.0))
    assert read(tmp_path)["loss"] == [(1, 6.0), (2, 4.0)]


@pytest.mark.parametrize(
    ("package", "opened"),
    [
        ("tensorboard", lambda folder: TensorBoard(folder, done=0)),
        ("wandb", lambda folder: WeightsAndBiases(folder, project="p", config={})),
    ],
)
def test_a_missing_client_is_named_with_what_to_install(monkeypatch, tmp_path, package, opened):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(PenstockError, match=rf"needs the package {package}.*pip install {package}"):
        opened(tmp_path)
