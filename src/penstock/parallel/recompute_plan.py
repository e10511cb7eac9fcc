"""Which blocks keep their activations and which compute them again in the backward pass; imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.core.units import mib, parse_count

Mode = Literal["keep", "operators", "full"]
"""Of one block: keep all it needs for its backward; keep what its matrix products and its attention
return; keep its input."""

COSTS: dict[Mode, float] = {"keep": 0.0, "operators": 0.15, "full": 1.0}
"""What is computed again, as a share of a block's forward pass; the order is what matters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Activations computed again in the backward pass instead of kept; the loss does not change by a bit."""

    policy: Literal["none", "operators", "every", "full", "budget"] = "none"
    """operators: keep what matrix products and attention return, compute the cheap rest again. full: keep the
    input of each block, compute it again whole, a third more work. every: `full` for each `every`-th block.
    budget: as little as fits into `budget`."""
    every: int = 2
    """every: 2 recomputes every second block, from the first on."""
    budget: str = ""
    """budget: bytes that the kept activations of all blocks may take on one rank, such as '20GiB'."""

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
        """`budget` as a number."""
        return parse_count(self.budget)


def plan(config: RecomputeConfig, *, num_blocks: int, kept: Mapping[Mode, int]) -> list[Mode]:
    """Return what each block does, in the order of the blocks.

    Args:
        kept: bytes that a block keeps in each mode on one rank, for its largest micro-batch.

    Raises:
        ConfigError: not even computing everything again fits the budget.

    >>> plan(RecomputeConfig(policy="every", every=3), num_blocks=4, kept={})
    ['full', 'keep', 'keep', 'full']
    """
    if config.policy == "budget":
        return _cheapest(config.budget_bytes, num_blocks=num_blocks, kept=kept)
    if config.policy == "every":
        return ["keep" if index % config.every else "full" for index in range(num_blocks)]
    same: dict[str, Mode] = {"none": "keep", "operators": "operators", "full": "full"}
    return [same[config.policy]] * num_blocks


def multiplied_again(modes: Sequence[Mode]) -> float:
    """Return the share of the blocks' matrix products that is computed a second time.

    >>> multiplied_again(["full", "keep", "operators", "keep"])
    0.25
    """
    return modes.count("full") / len(modes)


def _cheapest(budget: int, *, num_blocks: int, kept: Mapping[Mode, int]) -> list[Mode]:
    """Try all numbers of blocks in each mode; the blocks that recompute most come first."""
    fitting = []
    for full in range(num_blocks + 1):
        for some in range(num_blocks + 1 - full):
            modes = _modes(full, some, num_blocks - full - some)
            if sum(kept[mode] for mode in modes) <= budget:
                fitting.append((sum(COSTS[mode] for mode in modes), full, modes))
    if not fitting:
        raise ConfigError(
            f"recompute.budget is below the {mib(num_blocks * min(kept.values()))} that {num_blocks} blocks "
            "keep when all of them are computed again",
            got=mib(budget),
            fix="Raise it, or lower data.micro_batch_size or data.sequence_length.",
        )
    return min(fitting)[2]


def _modes(full: int, operators: int, keep: int) -> list[Mode]:
    modes: list[Mode] = []
    for mode, count in zip(COSTS, (keep, operators, full), strict=True):
        modes = [mode] * count + modes
    return modes
