"""Settings of islands that cannot be are refused, with what to do."""

import pytest

from penstock.core.errors import ConfigError
from penstock.core.units import mib
from penstock.parallel.layout import RankLayout
from penstock.train.islands.schedule import bytes_per_step
from penstock.train.planning.memory import memory_plan
from penstock.train.recipe.outer_config import OuterConfig
from penstock.train.resolve.summary import derive
from tests.islands import counting_corpus, recipe_of


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": -1}, "outer.every must be at least 0"),
        ({"every": 4, "fragments": 0}, "outer.fragments must be at least 1"),
        ({"every": 4, "fragments": 5}, r"outer.fragments must be at most outer.every \(4\)"),
        ({"every": 4, "overlap": 4}, r"outer.overlap must be below outer.every \(4\)"),
        ({"every": 4, "overlap": -1}, "outer.overlap must be at least 0"),
        ({"every": 4, "mixing": 0.5}, "outer.mixing needs outer.overlap"),
        ({"mixing": 1.0}, "outer.mixing must be at least 0 and below 1"),
        ({"learning_rate": 0.0}, "outer.learning_rate must be above 0"),
        ({"momentum": 1.0}, "outer.momentum must be at least 0 and below 1"),
    ],
)
def test_what_cannot_be_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        OuterConfig(**settings)


def test_islands_are_planned_with_their_memory_and_their_traffic(tmp_path):
    """The outer weights and their momentum are 8 bytes a parameter more on a rank."""
    corpus = counting_corpus(tmp_path / "corpus")
    plain = derive(recipe_of(corpus, tmp_path), world_size=2).numbers
    recipe = recipe_of(corpus, tmp_path, outer={"every": 4, "bits": 8})
    numbers = derive(recipe, world_size=2).numbers
    assert "islands" not in plain
    assert numbers["islands"] == 2
    sent = bytes_per_step(recipe.outer, parameters=recipe.model.num_parameters, islands=2)
    assert numbers["sent by an island per step"] == mib(round(sent))
    layout = RankLayout(replicate=2)
    more = memory_plan(recipe, layout).total - memory_plan(recipe_of(corpus, tmp_path), layout).total
    assert more == 8 * recipe.model.num_parameters


@pytest.mark.parametrize(
    ("outer", "parallel", "said"),
    [
        (
            {"every": 4},
            {"replicate": 1},
            "outer.every needs replicas of the model, and parallel.replicate is 1",
        ),
        ({"every": 4, "fragments": 3}, {}, "outer.fragments must be at most the model's 2 blocks"),
    ],
)
def test_a_recipe_whose_islands_cannot_be_is_refused(tmp_path, outer, parallel, said):
    with pytest.raises(ConfigError, match=said):
        recipe_of(counting_corpus(tmp_path / "corpus"), tmp_path, outer=outer, parallel=parallel)
