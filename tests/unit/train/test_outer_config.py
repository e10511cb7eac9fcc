"""Settings of islands that cannot be are refused, with what to do."""

import pytest

from penstock.core.errors import ConfigError
from penstock.train.outer_config import OuterConfig


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
