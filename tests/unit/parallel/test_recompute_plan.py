"""Which blocks are computed again, under each policy and for each budget."""

from itertools import product

import pytest

from penstock.core.errors import ConfigError, UsageError
from penstock.parallel.activation_checkpointing_plan import COSTS, RecomputeConfig, plan

KEPT = {"keep": 100, "operators": 60, "full": 10}


def modes(num_blocks=4, **settings):
    return plan(RecomputeConfig(**settings), kept=[KEPT] * num_blocks)


def test_a_policy_treats_all_blocks_alike_or_every_so_many():
    assert modes() == ["keep"] * 4
    assert modes(policy="operators") == ["operators"] * 4
    assert modes(policy="full") == ["full"] * 4
    assert modes(policy="every", every=2) == ["full", "keep", "full", "keep"]
    assert modes(policy="every", every=1) == ["full"] * 4


@pytest.mark.parametrize("budget", [*range(40, 401, 7), 400, 1000])
def test_a_budget_is_kept_and_no_cheaper_choice_would_keep_it(budget):
    found = modes(policy="budget", budget=str(budget))
    assert sum(KEPT[mode] for mode in found) <= budget
    cost = sum(COSTS[mode] for mode in found)
    for other in product(KEPT, repeat=4):
        assert sum(KEPT[mode] for mode in other) > budget or sum(COSTS[mode] for mode in other) >= cost


def test_a_budget_for_all_keeps_all():
    assert modes(policy="budget", budget="1KiB") == ["keep"] * 4


def test_a_budget_below_the_least_is_refused_with_the_least():
    with pytest.raises(
        ConfigError, match=r"below the 40 B that 4 blocks.*got '39 B'.*micro_batch_size"
    ) as error:
        modes(policy="budget", budget="39")
    assert "all are recomputed" in str(error.value)


@pytest.mark.parametrize("settings", [{"policy": "budget"}, {"budget": "1GiB"}])
def test_a_budget_and_its_policy_need_each_other(settings):
    with pytest.raises(ConfigError, match="need each other"):
        RecomputeConfig(**settings)


def test_settings_that_mean_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"recompute\.every must be 1 or more"):
        RecomputeConfig(every=0)
    with pytest.raises(UsageError, match="Not a count or size"):
        RecomputeConfig(policy="budget", budget="much")
