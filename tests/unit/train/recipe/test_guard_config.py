"""What a recipe may ask of the guard."""

import pytest

from penstock.core.errors import ConfigError
from penstock.train.recipe.config import GuardConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hang_s", 0.0),
        ("hang_s", float("inf")),
        ("hang_s", float("nan")),
        ("hang_s", 1e300),
        ("hang_s", 4e8),
        ("stop_within_s", 1e300),
        ("straggler_every", -1),
        ("stop_within_s", -1.0),
        ("straggler_ratio", 1.0),
    ],
)
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"guard\.{name}"):
        GuardConfig(**{name: value})
