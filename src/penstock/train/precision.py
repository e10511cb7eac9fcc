"""The `[precision]` section: in how many bits weights are kept and multiplied; imports no torch."""

from dataclasses import dataclass
from typing import Literal

Weights = Literal["float32", "bfloat16_master", "bfloat16_stochastic"]
Linear = Literal["compute", "float8_tensorwise", "float8_rowwise", "mxfp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Fewer bits for weights; see docs/precision.md for what each costs and gives."""

    weights: Weights = "float32"
    """float32: cast to `compute` when they are gathered. bfloat16_master: bfloat16 weights, a float32 copy
    beside the optimizer's states. bfloat16_stochastic: no copy; each update is rounded up or down at random,
    so that small ones are not lost on average."""

    linear: Linear = "compute"
    """How the linear layers of the blocks multiply, forward and backward: in the type of `compute`, or with
    both sides in 8 bits and a scale for a tensor, a row, or 32 neighbours of a row (mxfp8). Only scales that
    are powers of two are used. Elsewhere than on GPUs with such instructions it is emulated, slower."""


def weight_bytes_per_parameter(weights: Weights) -> int:
    """Return the bytes a rank keeps for each weight of its shard, a float32 copy counted.

    >>> [weight_bytes_per_parameter(w) for w in ("float32", "bfloat16_master", "bfloat16_stochastic")]
    [4, 6, 2]
    """
    return {"float32": 4, "bfloat16_master": 6, "bfloat16_stochastic": 2}[weights]


def gradient_bytes_per_parameter(weights: Weights) -> int:
    """Return the bytes a rank keeps for each gradient of its shard.

    >>> gradient_bytes_per_parameter("bfloat16_stochastic")
    2
    """
    return 4 if weights == "float32" else 2
