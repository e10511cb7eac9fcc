"""Islands against plain loops: the same losses and weights, whatever meets when."""

import dataclasses
import math

import pytest
import torch
from tests.islands import PlainIslands, counting_corpus, losses_of, recipe_of, trained, whole
from tests.rank_batches import RankBatches

from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.optim.optimizer import RULES as INNER_RULES
from penstock.train.optim.rule import UpdateRule
from penstock.train.setup import open_state


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return counting_corpus(tmp_path_factory.mktemp("corpus"))


RULES = {
    "local SGD": {"every": 4, "rule": "average"},
    "DiLoCo": {"every": 4},
    "DiLoCo that ends between two meetings": {"every": 5},
    "streaming": {"every": 4, "fragments": 2},
    "streaming with overlap": {"every": 6, "fragments": 2, "overlap": 2, "mixing": 0.5},
    "overlap of one step": {"every": 3, "overlap": 1},
}


@pytest.fixture(scope="module")
def by_rule(corpus, tmp_path_factory):
    """A function that returns what a rule trains in a plain loop, and on two ranks."""
    folder = tmp_path_factory.mktemp("rules")
    recipes = {name: recipe_of(corpus, folder / name, outer=outer) for name, outer in RULES.items()}

    def plainly(name, world):
        return PlainIslands(recipes[name], world, islands=2).train()

    plain = RankBatches(dict.fromkeys(RULES, 1), plainly)
    of_ranks = RankBatches(dict.fromkeys(RULES, 2), lambda name, world: trained(recipes[name], world))
    return lambda name: (plain.of(name)[0], of_ranks.of(name))


@pytest.mark.parametrize("rule", RULES)
def test_islands_train_as_a_plain_loop_does(by_rule, rule):
    """1e-5 over 12 steps of AdamW: sums of float32 in another order."""
    (losses, weights), of_ranks = by_rule(rule)
    for records, shown, _ in of_ranks:
        assert losses_of(records) == pytest.approx(losses, abs=1e-5)
        for name, weight in shown.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=1e-5, msg=name)


def test_islands_of_two_shards_train_as_a_plain_loop_over_their_rows_does(corpus, tmp_path):
    """Rows are dealt to all shards of a step; those of an island's shards are the island's."""
    outer = {"every": 3, "fragments": 2, "overlap": 1}
    recipe = recipe_of(corpus, tmp_path, outer=outer)
    plain = on_ranks(lambda world: PlainIslands(recipe, world, islands=2, shards=2).train(), ranks=1)
    ((losses, weights),) = plain
    sharded = recipe_of(corpus, tmp_path / "sharded", outer=outer, parallel={"shard": 2})
    for records, shown, _ in on_ranks(lambda world: trained(sharded, world), ranks=4):
        assert losses_of(records) == pytest.approx(losses, abs=2e-5)
        for name, weight in shown.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=2e-5, msg=name)


OF_TWO = {"every": 3, "fragments": 2, "overlap": 1}


@pytest.fixture(scope="module")
def islands_of_one(corpus, tmp_path_factory):
    """Records and weights of islands of one rank each."""
    recipe = recipe_of(corpus, tmp_path_factory.mktemp("one"), outer=OF_TWO)
    (records, weights, _), _ = on_ranks(lambda world: trained(recipe, world), ranks=2)
    return records, weights


AXES = ("tensor", "context", "pipeline")


@pytest.fixture(scope="module")
def islands_of_two(corpus, tmp_path_factory):
    """What each rank of islands of two ranks trains, by the axis that the two share."""
    folder, recipes = tmp_path_factory.mktemp("two"), {}
    for axis in AXES:
        data = {"micro_batch_size": 2} if axis == "pipeline" else {}
        two = recipe_of(corpus, folder / axis, outer=OF_TWO, parallel={"shard": 1, axis: 2})
        recipes[axis] = dataclasses.replace(two, data=dataclasses.replace(two.data, **data))
    return RankBatches(dict.fromkeys(AXES, 4), lambda axis, world: trained(recipes[axis], world))


@pytest.mark.parametrize("axis", AXES)
def test_islands_of_two_ranks_train_as_islands_of_one(islands_of_one, islands_of_two, axis):
    """An island's model is spread over its ranks; 2e-5: sums of float32 in yet another order."""
    records, weights = islands_of_one
    for found, shown, _ in islands_of_two.of(axis):
        assert losses_of(found) == pytest.approx(losses_of(records), abs=2e-5)
        assert [r["grad_norm"] for r in found] == pytest.approx([r["grad_norm"] for r in records], rel=1e-4)
        for name, weight in shown.items():
            torch.testing.assert_close(weight, weights[name], rtol=0, atol=2e-5, msg=name)


def plain_sgd(updates, group, divisor):
    assert divisor is None, "nothing is clipped"
    for one in updates:
        one.weight.sub_(one.gradient, alpha=100 * group["lr"])


def test_islands_of_sgd_that_meet_after_every_step_are_plain_data_parallel(corpus, tmp_path, monkeypatch):
    """1e-6: the mean of weights after a step instead of a step with the mean of gradients."""
    monkeypatch.setitem(INNER_RULES, "adamw", UpdateRule(lambda _: {}, plain_sgd))
    optim = {"learning_rate": 1e-3, "clip_norm": 1e9}
    met = recipe_of(corpus, tmp_path / "met", optim=optim, outer={"every": 1, "rule": "average"})
    plain = recipe_of(corpus, tmp_path / "plain", optim=optim)
    (expected, weights, _), _ = on_ranks(lambda world: trained(plain, world), ranks=2)
    for records, shown, own in on_ranks(lambda world: trained(met, world), ranks=2):
        assert losses_of(records) == pytest.approx(losses_of(expected), abs=1e-6)
        assert losses_of(records)[-1] < losses_of(records)[0] - 0.01, "it learns"
        for name, weight in weights.items():
            torch.testing.assert_close(shown[name], weight, rtol=0, atol=1e-6, msg=name)
            assert torch.equal(own[name], shown[name]), name


@pytest.fixture(scope="module")
def in_bits(corpus, tmp_path_factory):
    """What each of two ranks begins with, and what it trains with outer gradients in so many bits."""
    folder = tmp_path_factory.mktemp("bits")
    recipes = {
        str(bits): recipe_of(corpus, folder / str(bits), outer={"every": 4, "bits": bits})
        for bits in (32, 8, 4)
    }

    def work(bits, world):
        first = whole(dict(open_state(recipes[bits], world).model.named_parameters()))
        return first, trained(recipes[bits], world)

    return RankBatches(dict.fromkeys(recipes, 2), work)


@pytest.mark.parametrize(("bits", "worst"), [(8, 0.01), (4, 0.15)])
def test_outer_gradients_in_few_bits_stay_near_float32(in_bits, bits, worst):
    """8 bits are wrong by up to 1/254 of a block's largest number, 4 by 1/14, and that twice."""
    (first, (expected, weights, _)), _ = in_bits.of("32")
    (_, (records, shown, own)), (_, (_, same, _)) = in_bits.of(str(bits))
    assert losses_of(records)[:4] == losses_of(expected)[:4], "before the first meeting"
    assert losses_of(records) == pytest.approx(losses_of(expected), abs=worst)
    moved = math.sqrt(sum((weights[n] - first[n]).square().sum().item() for n in weights))
    wrong = math.sqrt(sum((weights[n] - shown[n]).square().sum().item() for n in weights))
    assert 0 < wrong < worst * moved
    assert all(torch.equal(shown[name], same[name]) for name in shown), "the same on all islands"
    assert all(torch.equal(shown[name], own[name]) for name in shown), "after the last step, all have met"


def fed(state, world, *, bad_at):
    """Poison one island's gradient at a step, by way of its loss."""
    forward = state.model.forward

    def poisoned(*args, **kwargs):
        loss = forward(*args, **kwargs)
        return loss * math.nan if state.step == bad_at and world.ranks.rank == 1 else loss

    state.model.forward = poisoned


def test_a_step_that_one_island_must_not_take_is_taken_by_none(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path, outer={"every": 4})

    def work(world):
        state = open_state(recipe, world)
        fed(state, world, bad_at=6)
        records = records_of(state, recipe, world)
        return records, whole(dict(state.model.named_parameters()))

    for records, weights in on_ranks(work, ranks=2):
        assert [r["step"] for r in records if r.get("event") == "skipped"] == [6]
        assert all(weight.isfinite().all() for weight in weights.values())


def test_the_loss_is_that_of_all_islands_and_held_out_rows_are_scored_by_the_outer_model(corpus, tmp_path):
    """Between two meetings: one island's own model would score otherwise than another's."""
    recipe = recipe_of(corpus, tmp_path, outer={"every": 50}, validate={"every": 3, "samples": 6})
    (records, _, _), (same, _, _) = on_ranks(lambda world: trained(recipe, world, stop_at=9), ranks=2)
    scores = [r["validation_loss"] for r in records if "validation_loss" in r]
    assert losses_of(records) == losses_of(same)
    assert len(scores) == 3
    assert len(set(scores)) == 1, "the outer model has not moved yet"
    assert losses_of(records)[8] < losses_of(records)[0] - 0.1, "the islands have"
