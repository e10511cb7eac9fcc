"""Baselines: named sets of CPU instructions, so that a library can be compiled ahead for machines unseen.

One library that chooses at run time is no alternative: the kernels are templates over vector widths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.errors import UsageError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A set of instructions."""

    name: str
    flags: tuple[str, ...]
    """Compiler flags: what the library may use."""
    needs: frozenset[str]
    """Flags of /proc/cpuinfo that a CPU must have to load it."""


_V3 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_V4 = _V3 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_BF16 = _V4 | frozenset(["avx512_vnni", "avx512_bf16"])
_AMX = _BF16 | frozenset(["amx_tile", "amx_bf16", "amx_int8"])
_V4_BF16 = ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16")

BASELINES = (
    Baseline(name="x86-64-v4-amx", flags=(*_V4_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), needs=_AMX),
    Baseline(name="x86-64-v4-bf16", flags=_V4_BF16, needs=_BF16),
    Baseline(name="x86-64-v4", flags=("-march=x86-64-v4",), needs=_V4),
    Baseline(name="x86-64-v3", flags=("-march=x86-64-v3",), needs=_V3),
)
"""Best first. The second: Cooper Lake, Zen 4; the first: Sapphire Rapids. The last: Haswell, Zen."""


def baselines_of(features: str) -> list[Baseline]:
    """Return the baselines whose libraries a CPU can run, best first.

    Args:
        features: its line of /proc/cpuinfo.

    >>> [found.name for found in baselines_of("flags : fma avx avx2 bmi1 bmi2 f16c abm movbe sse2")]
    ['x86-64-v3']
    >>> baselines_of("Features : fp asimd")
    []
    """
    has = set(features.partition(":")[2].split())
    return [baseline for baseline in BASELINES if baseline.needs <= has]


def baselines_named(names: Sequence[str]) -> list[Baseline]:
    """Return baselines by name; all, if there are no names.

    Raises:
        UsageError: a name is not known.
    """
    known = {baseline.name: baseline for baseline in BASELINES}
    for name in names:
        if name not in known:
            raise UsageError("There is no such baseline", got=name, fix=nearest(name, list(known)))
    return [known[name] for name in names or known]
