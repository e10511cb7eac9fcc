"""Settings of sampling: what is refused, and with which words."""

import pytest

from penstock.core.errors import UsageError
from penstock.engine.sampling_params import Sampling

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1.0, NAN, INFINITE)),
        ("top_k", 0),
        *(("top_p", value) for value in (0.0, 1.5, NAN)),
        *(("min_p", value) for value in (-0.1, 1.1, NAN)),
        *(("repetition_penalty", value) for value in (5e-324, 101.0, -1.0, NAN, INFINITE)),
        *(("presence_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, NAN)),
        *(("logit_bias", value) for value in ({-1: 0.0}, {3: 101.0}, {3: NAN}, {"3": 0.0}, {3: "1"})),
        *(("seed", value) for value in (2**63, -(2**63) - 1)),
        ("min_tokens", -1),
        *(("num_logprobs", value) for value in (-1, 21)),
        *((name, "1") for name in ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "seed")),
        *((name, 1.5) for name in ("top_k", "seed", "min_tokens", "num_logprobs")),
        *(("temperature", value) for value in (None, True)),
        ("logit_bias", [3]),
    ],
)
def test_settings_that_draw_nothing_are_refused(name, value):
    with pytest.raises(UsageError, match=name):
        Sampling(**{name: value})


def test_a_refusal_says_the_range_the_value_and_what_to_do():
    with pytest.raises(UsageError) as refusal:
        Sampling(presence_penalty=3)
    assert str(refusal.value) == "presence_penalty must be from -2 to 2 (got 3). 0 turns it off."
    with pytest.raises(UsageError) as refusal:
        Sampling(temperature=-1)
    assert str(refusal.value) == "temperature must be at least 0 (got -1). 0 is greedy."


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [5]}, "must be a tuple of token ids"),
        ({"bad_words_ids": ((),)}, "bad_words_ids is empty"),
        ({"bad_words_ids": (5,)}, "must be a tuple of token ids"),
        ({"logprob_token_ids": (5,)}, "without num_logprobs"),
        ({"logprob_token_ids": (-5,), "num_logprobs": 0}, "must be a tuple of token ids"),
    ],
)
def test_tokens_that_are_none_are_refused(settings, why):
    with pytest.raises(UsageError, match=why):
        Sampling(**settings)
