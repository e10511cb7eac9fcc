"""Plans of recipes without their corpora, and the recipes that come with Penstock."""

import tomllib

import pytest

from penstock.core import config
from penstock.core.errors import ConfigError, PenstockError, UsageError
from penstock.train.planning.devices import plan_recipe
from penstock.train.resolve.load import about, recipe_names, recipe_text

GIB = 2**30


def planned(name, *settings, devices=()):
    return plan_recipe(config.override(tomllib.loads(recipe_text(name)), list(settings)), devices=devices)


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_is_sound_and_says_what_it_is(name):
    plan = planned(name)
    assert plan.shares, "it fits some usual number of devices"
    assert 20 < len(about(recipe_text(name))) < 110
    assert set(plan.assumed) <= {"vocab_size", "max_position_embeddings", "preset"}


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_fits_into_80_gb_with_a_fifth_to_spare(name):
    assert all(share.memory.total < 60 * GIB for share in planned(name).shares)


def test_a_start_that_is_not_there_has_the_shape_that_it_is_named_after():
    plan = planned("tune-lora", devices=[1])
    assert plan.assumed == {"preset": "qwen3-8b"}
    assert plan.shares[0].memory.optimizer < 0.02 * 8 * plan.config.model.num_parameters
    with pytest.raises(PenstockError, match="nobodys-model"):
        planned("tune-lora", "run.start_from=./nobodys-model")


def test_bytes_are_those_of_the_parameters_that_a_device_has():
    (share,) = planned("llama3-8b", devices=[16]).shares  # two copies of the model, cut in eight
    assert share.layout == "replicate 2 x shard 8"
    assert (share.rows, share.micro_rows) == (32, 1)
    eighth = 8_030_261_248 // 8
    memory = share.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * eighth, 4 * eighth, 8 * eighth)


def test_the_axes_that_cut_matrices_cut_their_bytes_and_share_their_rows():
    (share,) = planned("llama3-70b", devices=[64]).shares
    assert (share.memory.weights, share.rows) == (4 * 70_553_706_496 // 64, 128)


def test_muon_keeps_less_for_the_matrices_of_the_blocks_only():
    (adamw,) = planned("tiny-qwen3", "optim.rule=adamw", devices=[1]).shares
    (muon,) = planned("tiny-qwen3", devices=[1]).shares
    embedding = 32_768 * 256
    assert adamw.memory.optimizer - muon.memory.optimizer == 4 * (
        planned("tiny-qwen3").config.model.num_parameters - embedding
    )


def test_a_number_of_devices_that_does_not_fit_is_refused_if_asked_for_and_left_out_if_not():
    with pytest.raises(ConfigError, match="do not divide 12 ranks"):
        planned("llama3-8b", devices=[12])
    assert {share.devices for share in planned("llama3-8b").shares} == {8, 64, 512}


def test_what_follows_from_the_corpora_is_assumed_unless_it_is_said():
    assert planned("tiny").assumed == {"vocab_size": 32_768, "max_position_embeddings": 256}
    assert planned("tiny", "model.vocab_size=500").assumed == {"max_position_embeddings": 256}


def test_a_recipe_without_a_section_is_refused():
    with pytest.raises(ConfigError, match=r"Missing key data\.corpora"):
        plan_recipe({})


def test_an_unknown_name_names_the_nearest():
    with pytest.raises(UsageError, match="Did you mean 'llama3-8b'"):
        recipe_text("lama3-8b")
