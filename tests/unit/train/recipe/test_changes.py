"""Planned changes: tokens to steps in closed form, ramps, and every plan that is refused."""

from itertools import pairwise

import pytest

from penstock.core.errors import ConfigError
from penstock.train.recipe.data_config import ChangeConfig, CorpusConfig, DataConfig, token_count
from penstock.train.recipe.planned_changes import RAMP_SEGMENTS, changes, micro_batch_sizes, plan, ramp


def data_of(*entries, **settings):
    corpora = {"web": CorpusConfig(path="w"), "code": CorpusConfig(path="c")}
    sizes = {"sequence_length": 8, "global_batch_size": 4, **settings}
    return DataConfig(corpora=corpora, schedule=tuple(ChangeConfig(**entry) for entry in entries), **sizes)


HALF = {"web": 1.0, "code": 1.0}


def test_tokens_become_the_first_step_that_begins_with_as_many():
    data = data_of(
        {"at_tokens": 100, "global_batch_size": 8},  # 32 a step: 96 before step 3, 128 before step 4
        {"at_tokens": 256, "sequence_length": 16},  # 64 a step: 128 + 2 * 64
        {"at_step": 10, "weights": HALF},
        {"at_tokens": "1k", "micro_batch_size": 2},  # 128 a step: 256 + 4 * 128 before step 10
    )
    assert [(planned.step, planned.tokens) for planned in plan(data)] == [
        (4, 128),
        (6, 256),
        (10, 768),
        (12, 1024),
    ]
    micro = micro_batch_sizes(data)
    assert [micro(step) for step in (0, 11, 12, 99)] == [None, None, 2, 2]


def test_a_ramp_in_tokens_ends_by_the_batch_sizes_in_force_on_its_way():
    data = data_of(
        {"at_step": 2, "weights": HALF, "ramp_tokens": 32 * 3 + 64 * 4},
        {"at_step": 5, "global_batch_size": 8},
    )
    assert plan(data)[0].ramp_ends == 2 + 3 + 4


@pytest.mark.parametrize("steps", [1, 2, 31, 32, 1000, 12345])
def test_a_ramp_is_few_mixtures_that_keep_near_the_line_and_end_at_the_weights(steps):
    told = ramp({"a": 0.9, "b": 0.1}, {"a": 1, "b": 4}, steps=range(50, 50 + steps))
    assert len(told) <= RAMP_SEGMENTS
    assert [change.step for change in told] == sorted({change.step for change in told})
    assert (told[0].step, told[-1].step, told[-1].weights) == (50, 50 + steps, {"a": 1, "b": 4})
    for change, following in pairwise(told):
        middle = ((change.step + following.step) / 2 - 50) / steps
        assert change.weights["a"] == pytest.approx(0.9 - 0.7 * middle, abs=0.0011), "a thousandth, rounded"


def test_without_a_ramp_the_weights_hold_at_once_and_exactly():
    (change,) = changes(data_of({"at_step": 7, "weights": {"web": 1 / 3, "code": 2 / 3}}), HALF)
    assert (change.step, change.weights) == (7, {"web": 1 / 3, "code": 2 / 3})


def test_a_second_ramp_begins_where_the_first_one_ended():
    data = data_of(
        {"at_step": 10, "weights": {"web": 1.0, "code": 0.0}, "ramp_steps": 2},
        {"at_step": 20, "weights": HALF, "ramp_steps": 2},
    )
    told = [(change.step, change.weights["web"]) for change in changes(data, {"web": 1, "code": 3})]
    assert told == [(10, 0.437), (11, 0.812), (12, 1.0), (20, 0.875), (21, 0.625), (22, 1.0)]


@pytest.mark.parametrize(
    ("text", "tokens"), [("10B", 10**10), ("1.5T", 15 * 10**11), ("3 m", 3 * 10**6), ("7", 7), (8, 8)]
)
def test_tokens_are_written_with_letters(text, tokens):
    assert token_count(text) == tokens


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"weights": HALF}, r"needs exactly one of at_step and at_tokens"),
        ({"at_step": 1, "at_tokens": 1, "weights": HALF}, r"needs exactly one of at_step and at_tokens"),
        ({"at_step": 1}, r"changes nothing\. Give it weights, global_batch_size"),
        ({"at_step": -1, "weights": HALF}, r"at_step in data\.schedule must be at least 0 \(got -1\)"),
        ({"at_step": 1, "global_batch_size": 0}, r"global_batch_size in data\.schedule must be at least 1"),
        ({"at_step": 1, "sequence_length": 1}, r"sequence_length in data\.schedule must be at least 2"),
        ({"at_step": 1, "micro_batch_size": 0}, r"micro_batch_size in data\.schedule must be at least 1"),
        ({"at_tokens": "10 gallons", "weights": HALF}, r"Not a number of tokens \(got '10 gallons'\)"),
        ({"at_tokens": "64MiB", "weights": HALF}, r"Not a number of tokens"),
        ({"at_step": 1, "ramp_steps": 5, "sequence_length": 9}, r"a ramp and no weights\. Only weights ramp"),
        (
            {"at_step": 1, "weights": HALF, "ramp_steps": 5, "ramp_tokens": 5},
            r"has ramp_steps and ramp_tokens",
        ),
        (
            {"at_step": 1, "weights": {"web": 1.0}},
            r"Entry 1 .* gives corpus 'code' no weight\. 0 leaves it out",
        ),
        (
            {"at_step": 1, "weights": {**HALF, "wbe": 1.0}},
            r"has a weight for an unknown corpus \(got 'wbe'\)\. Did you mean 'web'",
        ),
        ({"at_step": 1, "weights": {"web": 0.0, "code": 0.0}}, r"zero or more, and one above zero"),
        ({"at_step": 1, "weights": {"web": -1.0, "code": 2.0}}, r"zero or more, and one above zero"),
    ],
)
def test_an_entry_that_cannot_be_is_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        plan(data_of(entry))


@pytest.mark.parametrize("second", [{"at_step": 5}, {"at_step": 9}, {"at_tokens": 3}])
def test_entries_that_go_back_are_refused(second):
    entries = ({"at_step": 9, "global_batch_size": 8}, {**second, "weights": HALF})
    with pytest.raises(ConfigError, match=r"Entry 2 of data\.schedule .* not later than .* \(from step 9\)"):
        plan(data_of(*entries))


def test_weights_set_in_the_middle_of_a_ramp_are_refused():
    entries = ({"at_step": 5, "weights": HALF, "ramp_steps": 10}, {"at_step": 14, "weights": HALF})
    with pytest.raises(
        ConfigError, match=r"lasts until step 15, and weights are set again at step 14\. Shorten"
    ):
        plan(data_of(*entries))


@pytest.mark.parametrize(
    ("adaptive", "message"),
    [
        ({"policy": "odm"}, r"data\.adaptive\.policy is invalid: Unknown mixing policy \(got 'odm'\)"),
        ({"policy": "online_data_mixing", "options": {"speed": 1.0}}, "no such option .got .speed."),
        ({"policy": "online_data_mixing", "every": 0}, r"data\.adaptive\.every must be at least 1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(adaptive, message):
    from penstock.train.recipe.data_config import AdaptiveConfig

    with pytest.raises(ConfigError, match=message):
        AdaptiveConfig(**adaptive)


def test_a_policy_and_planned_weights_exclude_each_other():
    from penstock.train.recipe.data_config import AdaptiveConfig

    adaptive = AdaptiveConfig(policy="online_data_mixing")
    with pytest.raises(ConfigError, match=r"sets the weights, and so does an entry of data\.schedule"):
        data_of({"at_step": 3, "weights": HALF}, adaptive=adaptive)
    assert data_of({"at_step": 3, "global_batch_size": 8}, adaptive=adaptive).is_adaptive
