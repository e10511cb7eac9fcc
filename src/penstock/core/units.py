"""Units: format numbers for people, and parse sizes written by people."""

import math
import re
from fractions import Fraction
from typing import Annotated, Literal

from penstock.core.errors import UsageError

_SIZE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SI = tuple((10.0 ** (3 * power), "kMGTPEZY"[power - 1]) for power in range(8, 0, -1))
_LETTERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"))
_LARGEST = 1e15
"""Numbers from here on are written with an exponent."""

_MAX_COUNT = 2**62

Unit = Literal["number", "share"]
_SIZE |= {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)}


Count = Annotated[int, "count"]
"""A field whose option takes a count such as 10M or 64MiB."""


def parse_count(text: str) -> int:
    """Parse a count or size such as '64MiB', '10M' or '4096'.

    Raises:
        UsageError: the text is not a whole number with an optional known suffix.


    >>> parse_count("64MiB"), parse_count("10M"), parse_count("4096")
    (67108864, 10000000, 4096)
    """
    match = re.fullmatch(r"(\d{1,99}(?:\.\d{1,99})?)\s*([kmgt]?i?)b?", text.strip().lower())
    if not match or match[2] not in _SIZE or ("." in match[1] and not match[2]):
        raise UsageError("Not a count or size", got=text, fix="Write a number such as 4096, 10M or 64MiB.")
    count = int(Fraction(match[1]) * _SIZE[match[2]])  # exact: a float would round beyond 2**53
    if count > _MAX_COUNT:
        raise UsageError("A count or size can be at most 2**62", got=text)
    return count


def count_text(count: int) -> str:
    """Return a count as `parse_count` reads it, with the suffix that makes it shortest.

    >>> count_text(100_000_000), count_text(2**26), count_text(4096), count_text(0)
    ('100M', '64MiB', '4096', '0')
    """
    texts = [str(count)]
    for suffix, size in _SIZE.items():
        if count and size > 1024 and count % size == 0:
            texts.append(f"{count // size}{suffix[0].upper()}{'iB' if suffix.endswith('i') else ''}")
    return min(texts, key=len)


def si(value: float) -> str:
    """Format a count with three significant digits and an SI letter.

    >>> si(1_234_567), si(999), si(0.25)
    ('1.23M', '999', '0.25')
    """
    for power, letter in _SI:
        if abs(value) >= 0.9995 * power:  # three digits would round up to it
            return f"{value / power:.3g}{letter}"
    return f"{value:.3g}"


def short(value: float, *, unit: Unit = "number") -> str:
    """Format one value with four significant digits, a share with two or three.

    >>> short(6.13), short(12_345.6), short(3e-5), short(2_345_678)
    ('6.130', '12,350', '3e-5', '2.346M')
    >>> short(0.12345, unit="share"), short(0.00123, unit="share"), short(float("nan"))
    ('12.3%', '0.12%', 'NaN')
    """
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
    if unit == "share":
        return f"{100 * value:.3g}%" if abs(value) >= 0.1 else f"{100 * value:.2g}%"
    rounded = float(f"{value:.4g}")
    size = abs(rounded)
    if 0 < size < 0.001 or size >= _LARGEST:
        mantissa, _, exponent = f"{rounded:.3e}".partition("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size < 1000:
        return f"{rounded:#.4g}" if rounded else "0"
    if size < 1e6:
        return f"{rounded:,.0f}"
    power, letter = next(pair for pair in _LETTERS if size >= pair[0])
    return f"{rounded / power:.4g}{letter}"


def flops(value: float) -> str:
    """Format floating-point operations per second.

    >>> flops(1.7e11), flops(989e12)
    ('170 GFLOP/s', '989 TFLOP/s')
    """
    text = si(value)
    return f"{text[:-1]} {text[-1]}FLOP/s" if text[-1].isalpha() else f"{text} FLOP/s"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, whose plural ends in s or, after an s, in es.

    >>> plural(1, "fault"), plural(1200, "fault"), plural(2, "process")
    ('1 fault', '1,200 faults', '2 processes')
    """
    ending = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{ending}"


def mib(num_bytes: float) -> str:
    """Format bytes in binary units.

    >>> mib(5 * 2**20), mib(100)
    ('5.0 MiB', '100 B')
    """
    for power, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= power:
            return f"{num_bytes / power:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format a duration in seconds.

    >>> duration(3.2), duration(75), duration(7260)
    ('3.2 s', '1m15s', '2h01m')
    """
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
