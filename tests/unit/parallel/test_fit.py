"""Models that cannot be cut as a recipe asks."""

from dataclasses import dataclass

import pytest

from penstock.core.errors import ConfigError
from penstock.parallel.feasibility import check_fit
from penstock.parallel.layout import ParallelConfig

ULYSSES = {"context_rule": "ulysses"}


@dataclass
class Shape:
    vocab_size: int = 1000
    num_attention_heads: int = 12
    key_value_heads: int = 4
    size_of_head: int = 6
    intermediate_size: int = 64
    num_hidden_layers: int = 3


@pytest.mark.parametrize(
    ("shape", "parallel", "length", "said"),
    [
        (Shape(intermediate_size=48), {"tensor": 3}, 24, "neither divides model.num_key_value_heads 4 nor"),
        (Shape(intermediate_size=48), {"tensor": 3}, 24, "(got 3). Use one of 1, 2, 4, 12, the divisors"),
        (Shape(key_value_heads=1), {"tensor": 4}, 24, "(heads of 6) (got 4). Use one of 1, 2, the divisors"),
        (Shape(), {"tensor": 3}, 24, "intermediate_size 64 (got 3). Use one of 1, 2, 4"),
        (Shape(vocab_size=1001), {"tensor": 4}, 24, "1001 (got 4). Set model.vocab_size to 1004"),
        (Shape(), {"tensor": 4}, 30, "do not divide into 4 parts (parallel.context 1 x parallel.tensor 4)"),
        (Shape(), {"tensor": 4}, 30, "Use a sequence length of 28 or 32."),
        (Shape(), {"context": 8}, 6, "Use a sequence length of 8."),
        (Shape(), {"context": 8} | ULYSSES, 16, "one of 1, 2, 3, 4, 6, 12, or parallel"),
        (Shape(), {"context": 4, "tensor": 2} | ULYSSES, 16, "6 query heads on each of 2"),
        (Shape(), {"pipeline": 4}, 16, "are 4 stages, and the model has only 3 blocks. Use at most 3"),
        (Shape(), {"pipeline": 2, "stages_per_rank": 2}, 16, "are 4 stages, and the model has only 3 blocks"),
    ],
)  # fmt: skip
def test_what_does_not_divide_is_refused_with_what_would(shape, parallel, length, said):
    with pytest.raises(ConfigError) as refused:
        check_fit(ParallelConfig(**parallel), shape, lengths=[16, length])
    assert said in str(refused.value)


def test_every_model_fits_ranks_that_only_shard_and_copy():
    check_fit(ParallelConfig(shard=7, replicate=3), Shape(vocab_size=13, key_value_heads=1), lengths=[17])
