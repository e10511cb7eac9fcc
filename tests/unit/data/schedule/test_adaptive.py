"""Mixing policies: ODM against its formulas written out, rounding, and a memory that is JSON."""

import json
import math

import pytest

from penstock.core.errors import ConfigError, UsageError
from penstock.data.schedule.adaptive import POLICIES, OnlineDataMixing, thousandths


def written_out(turns, weights, *, smoothing):
    """The paper's algorithm, line by line, on unrounded numbers; weights are given back rounded each turn."""
    k, rewards, rate_before = len(weights), dict.fromkeys(weights, 0.0), 1 / len(weights)
    for turn, losses in enumerate(turns, start=1):
        for name, loss in losses.items():
            rewards[name] = smoothing * rewards[name] + (1 - smoothing) * loss / weights[name]
        rate = min(1 / k, math.sqrt(math.log(k) / (k * turn)))
        total = sum(math.exp(rate_before * reward) for reward in rewards.values())
        weights = {n: (1 - k * rate) * math.exp(rate_before * r) / total + rate for n, r in rewards.items()}
        weights, rate_before = thousandths(weights), rate
    return weights


@pytest.mark.parametrize("smoothing", [0.0, 0.9])
def test_the_weights_are_those_of_the_paper(smoothing):
    turns = [{"a": 4.0 - t / 9, "b": 3.0, "c": 5.0 + t} for t in range(12)]
    policy, weights = OnlineDataMixing(smoothing=smoothing), {"a": 0.5, "b": 0.3, "c": 0.2}
    expected = written_out(turns, weights, smoothing=smoothing)
    for losses in turns:
        weights = policy.decide(losses, weights)
    assert weights == expected
    assert weights["c"] == max(weights.values()), "what is learned worst is trained on most"


def test_early_turns_explore_and_no_corpus_ever_starves():
    policy, weights = OnlineDataMixing(smoothing=0.0), {"a": 0.9, "b": 0.1}
    weights = policy.decide({"a": 1.0, "b": 9.0}, weights)
    assert weights == {"a": 0.5, "b": 0.5}, "eps is 1/K"
    for _ in range(400):
        weights = policy.decide({"a": 0.0, "b": 9.0}, weights)
    assert weights["a"] >= 0.029, "sqrt(ln 2 / (2 * 401)) is 0.0294"


def test_a_corpus_left_out_stays_out_and_one_not_trained_on_keeps_its_reward():
    policy = OnlineDataMixing()
    weights = policy.decide({"a": 2.0}, {"a": 0.5, "b": 0.5, "c": 0.0})
    assert weights["c"] == 0.0
    assert sum(weights.values()) == pytest.approx(1)
    assert policy.state_dict()["rewards"] == {"a": pytest.approx(0.4), "b": 0.0}


def test_a_policy_resumed_from_json_decides_as_one_that_went_on():
    turns = [{"a": 4.0 / (t + 1), "b": 3.0, "c": math.pi * t} for t in range(9)]
    whole, weights = OnlineDataMixing(), {"a": 0.2, "b": 0.3, "c": 0.5}
    for turn, losses in enumerate(turns):
        if turn == 4:
            resumed = OnlineDataMixing()
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
            whole = resumed
        weights = whole.decide(losses, weights)
    assert weights == written_out(turns, {"a": 0.2, "b": 0.3, "c": 0.5}, smoothing=0.9)


def test_huge_rewards_do_not_overflow():
    weights = OnlineDataMixing(smoothing=0.0).decide({"a": 1e6, "b": 1.0}, {"a": 1e-3, "b": 0.999})
    assert all(math.isfinite(weight) for weight in weights.values())


@pytest.mark.parametrize("smoothing", [-0.1, 1.0, math.nan])
def test_a_smoothing_out_of_range_is_refused(smoothing):
    with pytest.raises(ConfigError, match=r"smoothing of online_data_mixing must be in \[0, 1\)"):
        OnlineDataMixing(smoothing=smoothing)


def test_policies_are_found_by_name():
    assert POLICIES["online_data_mixing"] is OnlineDataMixing
    with pytest.raises(UsageError, match=r"Unknown mixing policy .* Did you mean 'online_data_mixing'"):
        POLICIES["online_data_mixng"]


@pytest.mark.parametrize("count", [1, 3, 7, 400, 2000])
def test_rounded_weights_sum_to_one_and_lose_no_corpus(count):
    weights = {str(i): 1.0 / (i + 1) ** 2 for i in range(count)} | {"none": 0.0}
    rounded = thousandths(weights)
    assert math.fsum(rounded.values()) == pytest.approx(1, abs=1e-12)
    assert rounded["none"] == 0
    assert min(value for name, value in rounded.items() if name != "none") > 0
    assert thousandths(rounded) == rounded


def test_weights_that_are_all_zero_are_refused() -> None:
    with pytest.raises(ConfigError, match="The weights sum to zero"):
        thousandths({"web": 0, "code": 0})
