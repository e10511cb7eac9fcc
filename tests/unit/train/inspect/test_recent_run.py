"""A run that is asked for again and again: opened once, changed by nobody, opened again if it is another."""

import gc
import weakref

import pytest

from penstock.core import config
from penstock.core.errors import PenstockError
from penstock.core.files import write_json
from penstock.testing.corpora import write_corpus
from penstock.train.control.requests import ControlReply, answer
from penstock.train.inspect import recent_run
from penstock.train.inspect.recent_run import RecentRun
from penstock.train.resolve.load import build_recipe
from tests.launched import wait_until

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def write_recipe(run, *, steps):
    corpora = {name: {"path": str(run.parent / name), "weight": 1} for name in ("web", "code")}
    data = {"corpora": corpora, "sequence_length": 16, "global_batch_size": 4}
    raw = {"run": {"dir": str(run), "steps": steps}, "model": SIZES, "data": data}
    write_json(run / "config.json", config.dump(build_recipe(raw)))


@pytest.fixture
def run(tmp_path):
    for name in ("web", "code"):
        write_corpus(tmp_path / name, [[1 + i % 9] * 20 for i in range(60)], vocab_size=10)
    (tmp_path / "run" / "control").mkdir(parents=True)
    write_recipe(tmp_path / "run", steps=30)
    return tmp_path / "run"


@pytest.fixture
def recent():
    found = RecentRun()
    yield found
    found.close()


def test_a_run_is_opened_once_for_several_previews_and_none_changes_it_for_the_next(run, recent):
    with recent.lent(run) as first:
        first.loader.set_weights({"web": 0.9, "code": 0.1}, step=3)
        assert len(first.loader.mixtures) == 2
    with recent.lent(run) as again:
        assert again is first
        assert [weights for _, weights, _ in again.loader.mixtures] == [{"web": 0.5, "code": 0.5}]


def test_a_run_is_forgotten_after_some_seconds_as_its_checkpoints_may_be_others(run, recent, monkeypatch):
    monkeypatch.setattr(recent_run, "_KEPT_S", 0.01)
    with recent.lent(run) as first:
        loader = weakref.ref(first.loader)
    del first
    wait_until(lambda: gc.collect() >= 0 and loader() is None, "nobody holds the run")
    with recent.lent(run) as again:
        assert again.steps == 30


def test_a_run_with_a_new_reply_or_recipe_is_opened_again(run, recent):
    with recent.lent(run) as first:
        assert [step for step, _, _ in first.loader.mixtures] == [0]
    weights = {"web": 0.75, "code": 0.25}
    answer(run, ControlReply(number=1, taken_up=True, said="", step=4, holds_from=4, weights=weights))
    with recent.lent(run) as replied:
        assert [step for step, _, _ in replied.loader.mixtures] == [0, 4]
    write_recipe(run, steps=4000)
    with recent.lent(run) as longer:
        assert longer.steps == 4000
    (run / "config.json").unlink()
    with pytest.raises(PenstockError, match="holds no config"), recent.lent(run):
        pass
