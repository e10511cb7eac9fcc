"""The `[ethernet]` section takes infinity and refuses what means nothing."""

import math

import pytest

from penstock.core import config
from penstock.core.errors import ConfigError
from penstock.parallel.config import EthernetConfig


def test_budgets_may_be_infinite_and_survive_being_written():
    built = config.build(EthernetConfig, {"keep_mib": math.inf, "window_mib": 1.5})
    assert built.keep_bytes == math.inf
    assert built.window_bytes == 1.5 * 2**20
    assert config.build(EthernetConfig, config.dump(built)) == built


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"keep_mib": -1.0}, "ethernet.keep_mib must be at least 0"),
        ({"window_mib": math.nan}, "ethernet.window_mib"),
        ({"operations": 65}, "from 0 to 64"),
        ({"reduce": "int8", "overlap": False}, r"ethernet.overlap, which is off \(got 'int8'\)"),
        ({"feedback": True}, r"needs a compressed ethernet.reduce \(got 'float32'\)"),
    ],
)
def test_what_means_nothing_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        EthernetConfig(**wrong)
