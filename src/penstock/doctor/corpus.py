"""Check: how fast the loader serves the user's corpus on this machine."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import torch

from penstock.core import clock
from penstock.core.units import si
from penstock.data import Loader
from penstock.doctor.check import Asked
from penstock.doctor.finding import Finding, green, yellow

CHECK = "corpus"

_MOST_S = 3.0
_ROWS, _LENGTH = 8, 2048
_NEEDED_TOKENS_S = 100_000
"""By one accelerator: some 50,000 tokens/s of a 1B model, if 400 TFLOP/s come of it; twice that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One corpus."""

    name: str
    tokens_s: float
    """Served by one loader, with one thread that prepares."""
    first_batch_s: float
    """From opening the corpus to its first batch."""
    num_devices: int


def measure(asked: Asked) -> Facts | None:
    """Load for a few seconds; None where no corpus was asked for.

    Raises:
        PenstockError: the corpus is missing or damaged.
    """
    if not asked.corpus:
        return None
    start = clock.monotonic()
    loader = Loader(
        {"corpus": asked.corpus}, sequence_length=_LENGTH, global_batch_size=_ROWS, deliver="numpy"
    )
    with closing(iter(loader)) as batches:
        next(batches)
        first_s = clock.monotonic() - start
        start, steps = clock.monotonic(), 0
        while clock.monotonic() - start < _MOST_S:
            next(batches)
            steps += 1
        seconds = clock.monotonic() - start
    return Facts(
        name=asked.corpus,
        tokens_s=steps * _ROWS * _LENGTH / seconds,
        first_batch_s=first_s,
        num_devices=torch.cuda.device_count(),
    )


def judge(facts: Facts | None) -> Iterator[Finding]:
    """Hold the speed against what the devices of a machine take."""
    if facts is None:
        return
    yield green(
        CHECK,
        f"{facts.name}: {si(facts.tokens_s)} tokens/s from one loader, the first batch after "
        f"{facts.first_batch_s:.1f} s",
    )
    if facts.num_devices and facts.tokens_s < _NEEDED_TOKENS_S:
        yield yellow(
            CHECK,
            f"A device may take {si(_NEEDED_TOKENS_S)} tokens/s; the loader gives {si(facts.tokens_s)}",
            remedy="Copy the corpus to a local disk; one of another tool: penstock data convert.",
        )
