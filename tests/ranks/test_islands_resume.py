"""Checkpoints of islands: between two meetings, on as many islands, on more, on fewer, on none before."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.islands import counting_corpus, losses_of, recipe_of, trained, whole
from tests.rank_batches import RankBatches

from penstock.checkpoint.open_model import open_model
from penstock.checkpoint.tensors import training_tensors
from penstock.core.signals import StopFlag
from penstock.launch import local
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.inspect.audit import audit
from penstock.train.run import run
from penstock.train.setup import open_state


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return counting_corpus(tmp_path_factory.mktemp("corpus"))


STREAMING = {"every": 6, "fragments": 2, "overlap": 3, "mixing": 0.5, "bits": 8}


@pytest.fixture(scope="module")
def unstopped(corpus, tmp_path_factory):
    """What each of two ranks trains without a stop."""
    recipe = recipe_of(corpus, tmp_path_factory.mktemp("whole"), outer=STREAMING)
    return on_ranks(lambda world: trained(recipe, world), ranks=2)


STOPS = {"in flight": 4, "in flight again": 7, "turned": 8}


@pytest.fixture(scope="module")
def stopped(corpus, tmp_path_factory):
    """What each of two ranks trains up to each stop, and what two new processes train after it."""
    folder = tmp_path_factory.mktemp("stopped")
    recipes = {name: recipe_of(corpus, folder / name, outer=STREAMING) for name in STOPS}
    ranks = dict.fromkeys(STOPS, 2)
    first = RankBatches(ranks, lambda name, world: trained(recipes[name], world, stop_at=STOPS[name]))
    rest = RankBatches(ranks, lambda name, world: trained(recipes[name], world))
    return lambda name: (first.of(name), rest.of(name))


@pytest.mark.parametrize("stop", STOPS)
def test_a_run_stopped_between_two_meetings_resumes_to_the_same_bits(unstopped, stopped, stop):
    first, rest = stopped(stop)
    assert any(not torch.equal(first[0][2][name], first[1][2][name]) for name in first[0][2]), (
        "islands differ"
    )
    for (records, shown, _), (before, _, _), (after, found, _) in zip(unstopped, first, rest, strict=True):
        assert losses_of(before) + losses_of(after) == losses_of(records)
        assert all(torch.equal(found[name], shown[name]) for name in shown)


MIXED = {"every": 5, "overlap": 1, "mixing": 0.5}


CHANGES: dict[str, tuple[int, dict[str, Any]]] = {
    "one island": (1, {"every": 4}),
    "four islands": (4, {"every": 4}),
    "four islands, mixed": (4, MIXED),
}


@pytest.fixture(scope="module")
def changed(corpus, tmp_path_factory):
    """What two islands hold after step 6, and what another number of them begins with and trains."""
    folder, axes = tmp_path_factory.mktemp("changed"), {"replicate": -1, "shard": 1}
    recipes = {
        name: recipe_of(corpus, folder / name, parallel=axes, outer=outer)
        for name, (_, outer) in CHANGES.items()
    }

    def until_6(name, world):
        state = open_state(recipes[name], world)
        records_of(state, recipes[name], world, stop_at=6)
        own = whole(dict(state.model.named_parameters()))
        return own, whole(state.outer.values), whole(state.outer.momenta)

    def after_6(name, world):
        state = open_state(recipes[name], world)
        found = whole(dict(state.model.named_parameters()))
        return state.step, found, whole(state.outer.values), records_of(state, recipes[name], world)

    before = RankBatches(dict.fromkeys(CHANGES, 2), until_6)
    after = RankBatches({name: islands for name, (islands, _) in CHANGES.items()}, after_6)
    return lambda name: (before.of(name), after.of(name))


@pytest.mark.parametrize("change", CHANGES)
def test_another_number_of_islands_begins_with_an_outer_step_of_the_saved_ones(changed, change):
    """Stopped two steps after a meeting, or where islands kept something of their own; it is not lost."""
    ((one, outer, momentum), (other, _, _)), results = changed(change)
    for step, found, values, records in results:
        assert step == 6
        assert losses_of(records) == losses_of(results[0][3])
        assert [record["step"] for record in records] == list(range(7, 13))
        for name, weight in found.items():
            assert torch.equal(weight, values[name])
            moved = (2 * outer[name] - one[name] - other[name]) / 2
            expected = outer[name] - 0.7 * (moved + 0.9 * (0.9 * momentum[name] + moved))
            torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6, msg=name)


def test_a_run_without_islands_goes_on_with_them(corpus, tmp_path):
    plain, islands = recipe_of(corpus, tmp_path), recipe_of(corpus, tmp_path, outer={"every": 4})

    def go_on(world):
        state = open_state(islands, world)
        return whole(dict(state.model.named_parameters())), records_of(state, islands, world)

    (_, before, _), _ = on_ranks(lambda world: trained(plain, world, stop_at=5), ranks=2)
    for weights, records in on_ranks(go_on, ranks=2):
        assert all(torch.equal(weights[name], before[name]) for name in before)
        assert [record["step"] for record in records] == list(range(6, 13))


LEFT = {"between two meetings": 6, "where they have met": 8}


@pytest.fixture(scope="module")
def left(corpus, tmp_path_factory):
    """A run of islands stopped at each step, as one island opens it and as two ranks without islands do."""
    folder = tmp_path_factory.mktemp("left")
    axes = {"replicate": -1, "shard": 1}
    islands = {n: recipe_of(corpus, folder / n, parallel=axes, outer={"every": 4}) for n in LEFT}
    plain = {name: recipe_of(corpus, folder / name) for name in LEFT}

    def tensors(recipe, world):
        state = open_state(recipe, world)
        return whole(training_tensors(state.model, state.optimizer))

    def until_left(name, world):
        trained(islands[name], world, stop_at=LEFT[name])

    def go_on(name, world):
        return tensors(plain[name], world), trained(plain[name], world)[0]

    before = RankBatches(dict.fromkeys(LEFT, 2), until_left)
    alone = RankBatches(dict.fromkeys(LEFT, 1), lambda name, world: tensors(islands[name], world))
    after = RankBatches(dict.fromkeys(LEFT, 2), go_on)

    def found(name):
        before.of(name)
        return alone.of(name)[0], after.of(name)

    return found


@pytest.mark.parametrize("where", LEFT)
def test_a_run_with_islands_goes_on_without_them_as_one_with_one_island_would(left, where):
    """The same outer step on both ranks, and the moments of the first island."""
    expected, of_ranks = left(where)
    for found, records in of_ranks:
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert [record["step"] for record in records] == list(range(LEFT[where] + 1, 13))


def test_every_sample_is_trained_on_once_while_islands_leave_and_join(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", parallel={"replicate": -1, "shard": 1}, outer={"every": 4})
    recipe = replace(recipe, run=replace(recipe.run, log_samples=True))
    for islands, steps in ((2, 5), (4, 8), (1, 10), (2, 12)):
        part = replace(recipe, run=replace(recipe.run, steps=steps))
        outcome = local.run(
            lambda part=part: int(not run(part, StopFlag())), lambda error: (str(error), 1), processes=islands
        )
        assert outcome.code == 0, outcome
    found = audit(tmp_path / "run", progress=lambda *_: None)
    assert (found.steps, found.samples, found.ranks) == (12, 12 * 8, [2, 4, 1, 2])
    assert not found.faults


IN_BFLOAT16 = ("bfloat16_master", "bfloat16_stochastic")


@pytest.fixture(scope="module")
def in_bfloat16(corpus, tmp_path_factory):
    """What each of two ranks trains at once and up to step 6, and what two new processes train after it."""
    folder = tmp_path_factory.mktemp("bfloat16")
    at_once, cut = (
        {
            weights: recipe_of(
                corpus, folder / f"{weights}-{name}", outer={"every": 4}, precision={"weights": weights}
            )
            for weights in IN_BFLOAT16
        }
        for name in ("whole", "cut")
    )

    def begin(weights, world):
        return trained(at_once[weights], world), trained(cut[weights], world, stop_at=6)

    begun = RankBatches(dict.fromkeys(IN_BFLOAT16, 2), begin)
    resumed = RankBatches(dict.fromkeys(IN_BFLOAT16, 2), lambda weights, world: trained(cut[weights], world))
    return lambda weights: zip(begun.of(weights), resumed.of(weights), strict=True)


@pytest.mark.parametrize("weights", IN_BFLOAT16)
def test_islands_keep_weights_in_bfloat16(in_bfloat16, weights):
    """The outer weights are float32 either way; resumed in the middle, all bits come back."""
    for ((records, shown, own), _), (rest, found, _) in in_bfloat16(weights):
        assert losses_of(rest) == losses_of(records)[6:]
        assert all(torch.equal(found[name], shown[name]) for name in shown)
        assert {weight.dtype for weight in own.values()} == {torch.bfloat16}


def test_islands_that_have_just_met_take_no_outer_step_when_their_number_changes(corpus, tmp_path):
    """It would move on by the momentum alone."""
    recipe = recipe_of(corpus, tmp_path, parallel={"replicate": -1, "shard": 1}, outer={"every": 4})

    def after_8(world):
        state = open_state(recipe, world)
        return (
            whole(state.outer.values),
            whole(state.outer.momenta),
            whole(dict(state.model.named_parameters())),
        )

    (_, shown, _), _ = on_ranks(lambda world: trained(recipe, world, stop_at=8), ranks=2)
    for values, momenta, own in on_ranks(after_8, ranks=4):
        assert all(torch.equal(values[name], shown[name]) for name in shown)
        assert all(torch.equal(own[name], shown[name]) for name in shown)
        assert any(momentum.any() for momentum in momenta.values())


def test_islands_that_begin_when_an_exchange_would_be_under_way_have_not_met_at_its_end(corpus, tmp_path):
    """Two more begin after step 5, in the middle; when it would arrive, all moved by themselves."""
    recipe = recipe_of(
        corpus, tmp_path, parallel={"replicate": -1, "shard": 1}, outer={"every": 4, "overlap": 2}
    )

    def until(step):
        def work(world):
            state = open_state(recipe, world)
            records_of(state, recipe, world, stop_at=step)
            return state.outer.has_met, whole(dict(state.model.named_parameters()))

        return work

    on_ranks(until(5), ranks=2)
    (has_met, one), (_, other), *_ = on_ranks(until(6), ranks=4)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert not has_met
    (has_met, one), (_, other), *_ = on_ranks(until(10), ranks=4)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert has_met


def test_three_islands_become_two_of_equal_bits(corpus, tmp_path):
    """Three saved islands are summed in one order everywhere, so the outer parameters stay equal."""
    recipe = recipe_of(corpus, tmp_path, parallel={"replicate": -1, "shard": 1}, outer={"every": 4})
    recipe = replace(recipe, data=replace(recipe.data, global_batch_size=6))
    on_ranks(lambda world: trained(recipe, world, stop_at=6), ranks=3)
    one, other = on_ranks(lambda world: whole(open_state(recipe, world).outer.values), ranks=2)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_what_is_exported_and_generates_is_the_outer_model(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path, outer={"every": 50})
    (_, shown, own), _ = on_ranks(lambda world: trained(recipe, world, stop_at=5), ranks=2)
    model, _ = open_model(tmp_path)
    found = dict(model.named_parameters())
    assert all(torch.equal(found[name], weight) for name, weight in shown.items())
    assert any(not torch.equal(found[name], weight) for name, weight in own.items())
