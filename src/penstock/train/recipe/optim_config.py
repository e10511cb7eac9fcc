"""The [optim] section: update rule, its hyperparameters, and its memory; imports no torch."""

import math
from dataclasses import dataclass, field
from typing import Literal

from penstock.core import config
from penstock.core.errors import ConfigError

OptimizerName = Literal["adamw", "adamw_8bit", "muon"]

BLOCK = 128
"""Numbers of a row that share one scale, in 8-bit moments."""

SMALLEST = 4096
"""Minimum size of a matrix with 8-bit moments; smaller ones keep float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Optimizer rule and hyperparameters."""

    rule: OptimizerName = "adamw"
    """adamw (Loshchilov and Hutter, ICLR 2019). adamw_8bit: with 8-bit moments (Dettmers et al., ICLR 2022).
    muon (Jordan et al., 2024): orthogonalised steps for the matrices of the blocks, scaled to the size of
    AdamW's (Liu et al., arXiv:2502.16982) so that one learning rate serves both; adamw for the rest."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of AdamW's mean of the gradient."""
    beta2: float = 0.95
    """Decay of AdamW's mean of the squared gradient."""
    eps: float = 1e-8
    """Added to the root of that mean before AdamW divides by it."""
    momentum: float = 0.95
    """Nesterov momentum of muon."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    clip_norm: float = field(default=1.0, metadata=config.INFINITE)
    """Maximum norm of the whole gradient; larger gradients are scaled down."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:  # TOML has nan and inf
                raise ConfigError(f"optim.{name} must be a number above 0", got=getattr(self, name))
        if not self.clip_norm > 0:
            raise ConfigError("optim.clip_norm must be above 0; inf means no clipping", got=self.clip_norm)
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError("optim.weight_decay must be a number, zero or more", got=self.weight_decay)
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} must be in [0, 1)", got=getattr(self, name))


def optimizer_bytes_per_parameter(config: OptimConfig, *, in_blocks: bool = True) -> float:
    """Return the bytes of optimizer state per number of a matrix.

    Vectors (norms, biases) and matrices too small for 8 bits take 8; they are few.

    Args:
        in_blocks: True: a matrix of the blocks; False: an embedding or an output matrix.

    >>> [optimizer_bytes_per_parameter(OptimConfig(rule=rule)) for rule in ("adamw", "adamw_8bit", "muon")]
    [8.0, 2.0625, 4.0]
    """
    if config.rule == "adamw_8bit":
        return 2 * (1 + 4 / BLOCK)
    return 4.0 if config.rule == "muon" and in_blocks else 8.0


def fits_blocks(columns: int, *, whole: int, rows: int) -> bool:
    """Return True if `columns` of a matrix [rows, whole] on a rank are whole blocks of 8-bit moments.

    >>> fits_blocks(256, whole=512, rows=64), fits_blocks(64, whole=128, rows=64)
    (True, False)
    """
    return columns == whole or rows * whole < SMALLEST or not (whole % BLOCK or columns % BLOCK)
