"""The steps of a rank that shares parameters with no other: nothing is gathered and nothing is reduced.

`Ethernet` (scheduler.py) schedules the others. It imports FSDP2, which takes a second.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from penstock.parallel.config import EthernetConfig
from penstock.parallel.ethernet.breadth_first import take_micro_batches


class Unshared:
    """Takes the place of `Ethernet` where no parameter is shared.

    Args:
        stages: models without FSDP2.
    """

    def __init__(self, stages: Sequence[nn.Module], config: EthernetConfig) -> None:
        self.is_breadth_first = config.schedule == "breadth_first"
        """True if a step is one pass over all its micro-batches."""
        if self.is_breadth_first:
            for stage in stages:
                take_micro_batches(stage, [])

    @contextmanager
    def step(self, num_micro_batches: int) -> Iterator[None]:  # noqa: ARG002 - as `Ethernet`
        """Context manager for the passes of a step."""
        yield

    def next_micro_batch(self) -> None:
        """Do nothing: there is nothing to prepare."""
