"""What the cache keeps its numbers in."""

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.engine.model_runner.kv_cache import bytes_per_block, type_of_pages


def test_pages_are_of_the_type_of_the_model_unless_8_bits_are_asked_for():
    assert type_of_pages("auto", dtype=torch.bfloat16, head_dim=6) == torch.bfloat16
    assert type_of_pages("int8", dtype=torch.bfloat16, head_dim=8) == torch.int8


def test_8_bits_are_refused_where_scales_would_not_lie_straight():
    message = r"cache=int8 needs head_dim to be a multiple of 4 \(got 6\). Leave cache out"
    with pytest.raises(ConfigError, match=message):
        type_of_pages("int8", dtype=torch.float32, head_dim=6)


def test_a_block_of_8_bits_is_about_half_of_one_of_bfloat16():
    sizes = {"block_size": 16, "kv_heads": 12, "head_dim": 64}
    halves = (
        bytes_per_block(12, **sizes, dtype=torch.bfloat16),
        bytes_per_block(12, **sizes, dtype=torch.int8),
    )
    assert halves == (2 * 12 * 16 * 12 * 64 * 2, 2 * 12 * 16 * 12 * (64 + 4))
