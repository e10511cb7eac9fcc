"""A run that ends by its held-out loss: the same step after a kill; its best checkpoint kept."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from penstock.checkpoint.find import saved_of
from penstock.core.signals import StopFlag
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train import run as run_module
from penstock.train.early_stop import EarlyStop
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

NO_LOSS_FALLS_SO_FAR = 10.0


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")
    random = np.random.default_rng(0)
    write_corpus(folder / "a", [random.integers(1, 60, size=40).tolist() for _ in range(200)], vocab_size=64)
    return build_recipe(
        {
            "run": {"dir": str(folder / "run"), "steps": 100},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            },
            "data": {
                "corpora": {"a": {"path": str(folder / "a")}},
                "sequence_length": 32,
                "global_batch_size": 4,
                "holdout": 0.2,
            },
            "validate": {
                "every": 3,
                "samples": 4,
                "stop_after": 2,
                "min_improvement": NO_LOSS_FALLS_SO_FAR,
            },
            "checkpoint": {"every": 4, "keep": 1},
            "compute": "float32",
        }
    )


def trained(recipe, folder, *, ranks, stop_at=None):
    config = replace(recipe, run=replace(recipe.run, dir=str(folder)))

    def work(world):
        return records_of(open_state(config, world), config, world, stop_at=stop_at)

    return on_ranks(work, ranks=ranks)[0]


def stops_of(records):
    return [record for record in records if record.get("event") == "early_stop"]


def test_a_run_ends_after_so_many_validations_without_improvement(recipe, tmp_path):
    records = trained(recipe, tmp_path, ranks=1)
    (stop,) = stops_of(records)
    best = next(r["validation_loss"] for r in records if "validation_loss" in r)
    assert stop == {
        "event": "early_stop", "step": 9, "best_loss": best, "best_step": 3, "waited": 2,
    }  # fmt: skip
    assert [r["step"] for r in records if "loss" in r] == list(range(1, 10))
    assert [saved.name[-2:] for saved in saved_of(tmp_path)] == ["03", "09"], "the best and the last"


def test_a_resumed_run_stops_where_one_that_was_never_stopped_does(recipe, tmp_path):
    first = trained(recipe, tmp_path, ranks=1, stop_at=7)
    assert not stops_of(first)
    (stop,) = stops_of(trained(recipe, tmp_path, ranks=2))
    assert (stop["step"], stop["best_step"], stop["waited"]) == (9, 3, 2)


def test_a_run_that_ended_early_is_finished_until_it_is_given_more_patience(
    recipe, tmp_path, caplog, monkeypatch
):
    config = replace(recipe, run=replace(recipe.run, dir=str(tmp_path)))
    monkeypatch.setattr(run_module, "_peak", lambda *_: run_module.RunPeak(flops=None, device="", threads=1))
    monkeypatch.setattr(run_module.log, "set_up", lambda **_: None)
    with caplog.at_level("INFO", "penstock"):
        assert run_module.run(config, StopFlag())
        assert run_module.run(config, StopFlag())
    ends = [
        r
        for r in caplog.records
        if r.message.startswith("Finished early, after step 9: the held-out loss was best after step 3")
    ]
    assert len(ends) == 2
    assert "step-00000003" in caplog.text
    patient = replace(config, validate=replace(config.validate, stop_after=3))
    with caplog.at_level("INFO", "penstock"):
        assert run_module.run(patient, StopFlag())
    assert "Finished early, after step 12: the held-out loss was best after step 3" in caplog.text


def test_validations_without_a_number_count_through_a_resume():
    stop = EarlyStop(stop_after=3)
    assert not any(stop.add(step, math.nan) for step in (10, 20))
    again = EarlyStop(stop_after=3)
    again.load_state_dict(json.loads(json.dumps(stop.state_dict(), allow_nan=False)))
    assert (again.waited, again.best_step, again.is_over) == (2, 0, False)
    assert not again.add(30, math.nan)
    assert again.is_over
