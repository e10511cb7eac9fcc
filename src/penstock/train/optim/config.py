"""The `[optim]` section: which rule changes the weights, its numbers, and its memory; imports no torch."""

import math
from dataclasses import dataclass, field
from typing import Literal

from penstock.core import config
from penstock.core.errors import ConfigError

Rule = Literal["adamw", "adamw_8bit", "muon"]

BLOCK = 128
"""Neighbours in a row of a matrix that share one scale, in 8-bit moments."""

SMALLEST = 4096
"""Numbers of a matrix whose moments are in 8 bits; smaller ones keep float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """How weights follow gradients."""

    rule: Rule = "adamw"
    """adamw (Loshchilov and Hutter, ICLR 2019). adamw_8bit: its moments in 8 bits (Dettmers et al., ICLR
    2022). muon (Jordan et al., 2024): orthogonal steps for the matrices of the blocks, scaled to the size of
    AdamW's (Liu et al., arXiv:2502.16982) so that one learning rate serves both; adamw for the rest."""
    learning_rate: float = 3e-4
    """Peak."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    """Of muon, with Nesterov's look ahead."""
    weight_decay: float = 0.1
    """On matrices; norms and biases have none."""
    clip_norm: float = field(default=1.0, metadata=config.INFINITE)
    """Largest norm of the whole gradient; larger ones are scaled down to it."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:  # TOML has nan and inf
                raise ConfigError(f"optim.{name} must be a number above 0", got=getattr(self, name))
        if not self.clip_norm > 0:
            raise ConfigError("optim.clip_norm must be above 0; inf: never clip", got=self.clip_norm)
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError("optim.weight_decay must be a number, zero or more", got=self.weight_decay)
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optim.{name} must be in [0, 1)", got=getattr(self, name))


def optimizer_bytes_per_parameter(config: OptimConfig, *, in_blocks: bool = True) -> float:
    """Return the bytes of state that a rule keeps for each number of a matrix.

    Vectors (norms, biases) and matrices too small for 8 bits keep 8; they are few.

    Args:
        in_blocks: a matrix of the blocks; False: an embedding or an output matrix.

    >>> [optimizer_bytes_per_parameter(OptimConfig(rule=rule)) for rule in ("adamw", "adamw_8bit", "muon")]
    [8.0, 2.0625, 4.0]
    """
    if config.rule == "adamw_8bit":
        return 2 * (1 + 4 / BLOCK)
    return 4.0 if config.rule == "muon" and in_blocks else 8.0


def fits_blocks(columns: int, *, whole: int, rows: int) -> bool:
    """Return whether `columns` of a matrix [rows, whole] on a rank are whole blocks of 8-bit moments.

    >>> fits_blocks(256, whole=512, rows=64), fits_blocks(64, whole=128, rows=64)
    (True, False)
    """
    return columns == whole or rows * whole < SMALLEST or not (whole % BLOCK or columns % BLOCK)
