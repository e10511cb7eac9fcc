"""Activation checkpointing plan: which blocks recompute in the backward pass; imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.core.units import mib, parse_count

Mode = Literal["keep", "operators", "full"]
"""Activations that a block keeps for its backward pass: all; the outputs of matrix products and attention;
its input."""

COSTS: dict[Mode, float] = {"keep": 0.0, "operators": 0.15, "full": 1.0}
"""Recomputed share of a block's forward pass; only the order matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing: recompute activations in the backward pass; the loss is bit-identical."""

    policy: Literal["none", "operators", "every", "full", "budget"] = "none"
    """none. operators: keep the outputs of matrix products and attention, recompute the cheap rest. full:
    keep only the input of each block, recompute the block, a third more work. every: `full` for each
    `every`-th block. budget: recompute as little as fits into `budget`."""
    every: int = 2
    """With every: 2 recomputes every second block, starting with the first."""
    budget: str = ""
    """With budget: bytes of all blocks' kept activations on one rank, such as '20GiB'."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError("recompute.every must be 1 or more", got=self.every)
        if bool(self.budget) != (self.policy == "budget"):
            raise ConfigError(
                "recompute.budget and recompute.policy = 'budget' need each other",
                got=f"budget {self.budget!r}, policy {self.policy!r}",
                fix="Set both, or neither.",
            )
        if self.budget:
            parse_count(self.budget)

    @property
    def budget_bytes(self) -> int:
        """`budget` in bytes."""
        return parse_count(self.budget)


def plan(config: RecomputeConfig, *, kept: Sequence[Mapping[Mode, int]]) -> list[Mode]:
    """Return the mode of each block, in order.

    Args:
        kept: bytes that each block keeps in each mode on one rank, for its largest micro-batch.

    Raises:
        ConfigError: recomputing everything does not fit the budget either.

    >>> plan(RecomputeConfig(policy="every", every=3), kept=[{}] * 4)
    ['full', 'keep', 'keep', 'full']
    """
    if config.policy == "budget":
        return _cheapest(config.budget_bytes, kept)
    if config.policy == "every":
        return ["keep" if index % config.every else "full" for index in range(len(kept))]
    same: dict[str, Mode] = {"none": "keep", "operators": "operators", "full": "full"}
    return [same[config.policy]] * len(kept)


def multiplied_again(modes: Sequence[Mode], parameters: Sequence[int]) -> float:
    """Return the share of the blocks' matrix products that is recomputed, given the parameters of each block.

    >>> multiplied_again(["full", "keep", "operators", "keep"], [20, 20, 20, 20])
    0.25
    """
    again = (count for mode, count in zip(modes, parameters, strict=True) if mode == "full")
    return sum(again) / sum(parameters)


def _cheapest(budget: int, kept: Sequence[Mapping[Mode, int]]) -> list[Mode]:
    """Return the cheapest modes that fit, by trying all numbers of blocks per mode; most recomputation
    first."""
    fitting, num_blocks = [], len(kept)
    for full in range(num_blocks + 1):
        for some in range(num_blocks + 1 - full):
            modes = _modes(full, some, num_blocks - full - some)
            if sum(block[mode] for block, mode in zip(kept, modes, strict=True)) <= budget:
                fitting.append((sum(COSTS[mode] for mode in modes), full, modes))
    if not fitting:
        raise ConfigError(
            f"recompute.budget is below the {mib(sum(min(block.values()) for block in kept))} that "
            f"{num_blocks} blocks keep even if all are recomputed",
            got=mib(budget),
            fix="Raise it, or lower data.micro_batch_size or data.sequence_length.",
        )
    return min(fitting)[2]


def _modes(full: int, operators: int, keep: int) -> list[Mode]:
    modes: list[Mode] = []
    for mode, count in zip(COSTS, (keep, operators, full), strict=True):
        modes = [mode] * count + modes
    return modes
