"""Check: loading speed of the user's corpus on this machine."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from penstock.core import clock
from penstock.core.units import si
from penstock.data import Loader
from penstock.devices import accelerator
from penstock.doctor.checks.check import CheckOptions, Finding, green, yellow

CHECK = "corpus"

_MAX_S = 3.0
_ROWS, _LENGTH = 8, 2048
_NEEDED_TOKENS_S = 100_000
"""Twice the consumption of one accelerator: some 50,000 tokens/s of a 1B model at 400 TFLOP/s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """Loading speed of one corpus."""

    name: str
    tokens_s: float
    """Tokens per second of one loader with one prefetching thread."""
    first_batch_s: float
    """Time from opening the corpus to its first batch."""
    num_devices: int


def measure(options: CheckOptions) -> LoaderFacts | None:
    """Load for a few seconds; None if no corpus was given.

    Raises:
        PenstockError: the corpus is missing or damaged.
    """
    if not options.corpus:
        return None
    start = clock.monotonic()
    loader = Loader(
        {"corpus": options.corpus}, sequence_length=_LENGTH, global_batch_size=_ROWS, deliver="numpy"
    )
    with closing(iter(loader)) as batches:
        next(batches)
        first_s = clock.monotonic() - start
        start, steps = clock.monotonic(), 0
        while clock.monotonic() - start < _MAX_S:
            next(batches)
            steps += 1
        seconds = clock.monotonic() - start
    return LoaderFacts(
        name=options.corpus,
        tokens_s=steps * _ROWS * _LENGTH / seconds,
        first_batch_s=first_s,
        num_devices=accelerator.count(),
    )


def judge(facts: LoaderFacts | None) -> Iterator[Finding]:
    """Compare the speed with the consumption of the machine's devices."""
    if facts is None:
        return
    yield green(
        f"{facts.name}: {si(facts.tokens_s)} tokens/s from one loader, the first batch after "
        f"{facts.first_batch_s:.1f} s"
    )
    if facts.num_devices and facts.tokens_s < _NEEDED_TOKENS_S:
        yield yellow(
            f"A device may take {si(_NEEDED_TOKENS_S)} tokens/s; the loader gives {si(facts.tokens_s)}",
            remedy="Copy the corpus to a local disk; one of another tool: penstock data convert.",
        )
