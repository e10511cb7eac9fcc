"""Training on several gloo ranks against one process: same samples, same losses, same weights."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor

from penstock.checkpoint.layout import NUMERICS
from penstock.obs.meter import StepMeter
from penstock.parallel.activation_checkpointing_plan import RecomputeConfig
from penstock.parallel.mesh import join
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.loop import train
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

VOCAB = 50


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (400,), generator=generator).tolist()
    documents = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


def recipe_of(corpus, folder, *, steps=20, **data):
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": steps},
            "model": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 12,
                "holdout": 0.1,
                **data,
            },
            "optim": {"learning_rate": 1e-2},
            "validate": {"every": steps, "samples": 13},
            "compute": "float32",
        }
    )


def losses_of(recipe, world):
    """Train and return the records and the whole weights."""
    records = []
    state = open_state(recipe, world)
    meter = StepMeter(flops_per_token=lambda _: 1, peak_flops=1)
    finished = train(
        state,
        recipe,
        world,
        meter=meter,
        stop_requested=lambda: False,
        sinks=[records.append],
        on_batch=lambda *_: None,
    )
    assert finished
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in state.model.named_parameters()
    }
    return records, weights


@pytest.fixture(scope="module")
def one_process(corpus, tmp_path_factory):
    with join() as world:
        torch.set_num_threads(1)
        return losses_of(recipe_of(corpus, tmp_path_factory.mktemp("one")), world)


@pytest.mark.parametrize(("ranks", "rows"), [(2, 2), (4, None)])
def test_sharded_losses_equal_those_of_one_process(corpus, tmp_path, one_process, ranks, rows):
    """1e-5 over 20 steps in float32: sums of float32 in another order, and nothing else."""
    recipe = recipe_of(corpus, tmp_path, micro_batch_size=rows)
    results = on_ranks(lambda world: losses_of(recipe, world), ranks=ranks)
    expected_records, expected_weights = one_process
    for records, weights in results:
        assert len(records) == len(expected_records) == 21
        for record, expected in zip(records, expected_records, strict=True):
            for name in {"loss", "grad_norm", "validation_loss"} & set(expected):
                assert record[name] == pytest.approx(expected[name], abs=1e-5), (expected["step"], name)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-4)


def test_bfloat16_compute_stays_near_float32_and_keeps_float32_weights(corpus, tmp_path, one_process):
    """bfloat16 has 8 bits of precision: 2e-2 on a loss of 3.9 is four of its roundings."""
    recipe = dataclasses.replace(recipe_of(corpus, tmp_path), compute="bfloat16")
    ((records, weights), _) = on_ranks(lambda world: losses_of(recipe, world), ranks=2)
    for record, expected in zip(records, one_process[0], strict=True):
        if "loss" in expected:
            assert record["loss"] == pytest.approx(expected["loss"], abs=2e-2), expected["step"]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_recipe_that_recomputes_trains_to_the_same_bits(corpus, tmp_path):
    plain, again = (recipe_of(corpus, tmp_path / name, steps=4) for name in ("plain", "again"))
    again = dataclasses.replace(again, recompute=RecomputeConfig(policy="every"))
    expected, found = (
        on_ranks(lambda world, recipe=recipe: losses_of(recipe, world), ranks=1)[0]
        for recipe in (plain, again)
    )
    assert [r.get("loss") for r in found[0]] == [r.get("loss") for r in expected[0]]
    assert all(weight.equal(expected[1][name]) for name, weight in found[1].items())


def test_training_learns_and_the_validation_loss_is_a_mean_over_heldout_rows(one_process):
    records, _ = one_process
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(VOCAB)).item(), abs=0.05), "uniform at the start"
    assert losses[-1] < losses[0]


def test_resuming_on_the_same_ranks_is_bit_identical(corpus, tmp_path):
    def stop_and_go(world):
        torch.set_num_threads(1)
        records = []
        for stop_at in (3, 99):
            state = open_state(recipe, world)
            assert state.resumed_numerics == NUMERICS
            records += records_of(state, recipe, world, stop_at=stop_at)
        return [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]

    recipe = recipe_of(corpus, tmp_path / "two", steps=8)
    again = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, dir=str(tmp_path / "whole")))
    stopped = on_ranks(stop_and_go, ranks=2)
    whole = on_ranks(lambda world: losses_of(again, world)[0], ranks=2)
    expected = [(r["step"], r["loss"], r["grad_norm"]) for r in whole[0] if "loss" in r]
    assert stopped[0] == stopped[1] == expected, "every digit of every step"
