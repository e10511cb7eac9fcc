"""Which steps a recipe may ask to be looked at."""

import pytest

from penstock.core.errors import ConfigError
from penstock.train.recipe.config import MeasureConfig


@pytest.mark.parametrize("text", ["20", "0:3", "5:5", "6:5", "1:102", "a:b", "1:2:3", "-1:3", "1.5:3"])
@pytest.mark.parametrize("name", ["trace_steps", "memory_steps"])
def test_steps_that_are_none_or_too_many_are_refused_by_name(name, text):
    with pytest.raises(ConfigError, match=name):
        MeasureConfig(**{name: text})


@pytest.mark.parametrize("text", ["", "1:2", "20:23", "1:101"])
def test_steps_are_given_as_first_and_past(text):
    MeasureConfig(trace_steps=text)
