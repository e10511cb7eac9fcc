"""The arithmetic of how much fits."""

from functools import partial

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.model_runner.capacity import num_blocks_for, step_tokens
from penstock.engine.scheduling.groups import blocks_of

SIZES = {"block_bytes": 2**20, "blocks_of": lambda n: -(-n // 16), "context": 100, "max_sequences": 3}


@pytest.mark.parametrize(("free_mib", "blocks"), [(7, 7), (20, 20), (21, 21), (1000, 21)])
def test_the_cache_takes_what_is_free_and_no_more_than_is_of_use(free_mib, blocks):
    assert num_blocks_for(free_mib * 2**20, **SIZES) == blocks  # 100 positions are 7 blocks


def test_less_than_one_context_is_refused_with_what_would_fit():
    with pytest.raises(ConfigError, match=r"100 tokens are 7 blocks of 1.0 MiB, 7.0 MiB.*at most 96, "):
        num_blocks_for(7 * 2**20 - 1, **SIZES)


def test_layers_with_windows_need_no_more_than_their_windows_and_a_share():
    windows = {"windows": (None, 20, 20), "block_size": 16, "share_tokens": 10}
    sizes = {**SIZES, "blocks_of": partial(blocks_of, **windows), "max_sequences": 1}
    assert num_blocks_for(2**30, **sizes) == 7 + 3 + 3  # 29 positions are at most 3 blocks
    with pytest.raises(ConfigError, match=r"13 blocks.*at most 96, "):
        num_blocks_for(12 * 2**20, **sizes)


def test_no_context_of_length_0_is_advised():
    with pytest.raises(ConfigError, match="Give the cache more memory") as said:
        num_blocks_for(2**19, **SIZES)
    assert "at most 0" not in str(said.value)


def test_a_step_has_room_for_every_answer_and_its_drafts():
    assert step_tokens("cpu", asked=None, max_sequences=1, num_drafts=0) == 4096
    assert step_tokens("cpu", asked=None, max_sequences=2000, num_drafts=2) == 6000
    assert step_tokens("cuda", asked=7, max_sequences=1000, num_drafts=2) == 7
