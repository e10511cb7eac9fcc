"""Schedule of islands: which fragment of the model is averaged at which step, and its bytes; pure.

A fragment is some blocks of the model. Its exchange between islands starts after a step, has a turning point
(gathered values are averaged and returned), and completes `overlap` steps after its start:

    every 8, fragments 2, overlap 2       step  1 2 3 4 5 6 7 8 9 10 11 12
                                 fragment 0           b t a             b
                                 fragment 1                   b t a

Fragments take every n-th block, because neighbouring blocks learn alike (Douillard et al., "Streaming
DiLoCo", 2025, section 3.2). After the last step of a run all fragments sync regardless of the schedule, so
that the final model has seen all data.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.parallel.ethernet.wire_size import CodecName, exchange_bytes
from penstock.train.recipe.outer_config import OuterConfig

CODECS: Final[Mapping[int, CodecName]] = {32: "float32", 8: "int8", 4: "int4"}
"""Codec of exchanged numbers, by `outer.bits`."""
_BLOCK = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """Fragments to handle after a step, in this order."""

    begin: tuple[int, ...] = ()
    turn: tuple[int, ...] = ()
    arrive: tuple[int, ...] = ()


def due(config: OuterConfig, step: int, *, last: bool = False) -> Due:
    """Return what is due after a step, counted from 1.

    Args:
        last: True for the run's last step.

    >>> streaming = OuterConfig(every=8, fragments=2, overlap=2)
    >>> [step for step in range(1, 20) if due(streaming, step).begin == (0,)]
    [4, 12]
    >>> due(streaming, 5), due(streaming, 6)
    (Due(begin=(), turn=(0,), arrive=()), Due(begin=(), turn=(), arrive=(0,)))
    """
    everything = tuple(range(config.fragments))
    if last:
        return Due(begin=everything, turn=everything, arrive=everything)

    def began(ago: int) -> tuple[int, ...]:
        return tuple(each for each in everything if _begins(config, each, step - ago))

    return Due(begin=began(0), turn=began(-(-config.overlap // 2)), arrive=began(config.overlap))


def in_flight(config: OuterConfig, step: int) -> tuple[int, ...]:
    """Return the fragments whose exchange is in progress after a step.

    >>> in_flight(OuterConfig(every=8, fragments=2, overlap=2), 5)
    (0,)
    """
    lately = range(step - config.overlap + 1, step + 1)
    return tuple(each for each in range(config.fragments) if any(_begins(config, each, s) for s in lately))


def _begins(config: OuterConfig, fragment: int, step: int) -> bool:
    """True if a fragment's exchange starts after a step; the last fragment's do at multiples of `every`."""
    offset = (fragment + 1) * config.every // config.fragments
    return step > 0 and (step - offset) % config.every == 0


def fragment_of(name: str, fragments: int) -> int:
    """Return the fragment of a parameter: blocks round robin, the embedding in the first, others in the last.

    >>> [fragment_of(f"layers.{block}.mlp.up.weight", 2) for block in range(4)]
    [0, 1, 0, 1]
    >>> fragment_of("embed_tokens.weight", 2), fragment_of("norm.weight", 2)
    (0, 1)
    """
    if found := _BLOCK.search(name):
        return int(found[1]) % fragments
    return 0 if "embed" in name else fragments - 1


def bytes_per_step(config: OuterConfig, *, parameters: int, islands: int) -> float:
    """Return the mean bytes per step that the ranks of one island send to other islands.

    Without outer steps that is the all-reduce of float32 gradients. The few numbers of each step, such as
    loss and label count, are not included.

    >>> every_step = bytes_per_step(OuterConfig(), parameters=1_024_000, islands=2)
    >>> every_step, every_step / bytes_per_step(OuterConfig(every=32), parameters=1_024_000, islands=2)
    (4096000.0, 32.0)
    """
    codec = CODECS[config.bits] if config.every else "float32"
    return exchange_bytes(parameters, ranks=islands, codec=codec) / max(config.every, 1)
