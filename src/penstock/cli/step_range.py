"""Steps on a command line: `1200:1210` is the steps 1200 to 1209, counted from 1 as the logs count them."""

import re

from penstock.core.errors import UsageError


def step_range(text: str, *, option: str) -> range:
    """Read a range of steps, or one step.

    Raises:
        UsageError: it is none, or empty.

    >>> step_range("1200:1210", option="--steps"), step_range("7", option="--steps")
    (range(1200, 1210), range(7, 8))
    """
    match = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text.strip())
    steps = range(0)
    if match:
        first = int(match[1])
        steps = range(first, int(match[2]) if match[2] else first + 1)
    if not steps or not steps[0]:
        raise UsageError(
            f"{option} takes FIRST:PAST, steps counted from 1, the last one left out",
            got=text,
            fix=f"Example: {option} 1200:1210.",
        )
    return steps
