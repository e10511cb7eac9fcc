"""How many examples a law is tried with: in `make test` a third of its number, in `make soak` three times.

HYPOTHESIS_PROFILE=soak, or `pytest --hypothesis-profile soak`, chooses the second.
"""

import os
from typing import Any

from hypothesis import HealthCheck, settings

_LEAST = 10
_USUAL = 100  # what hypothesis tries where nothing is asked for

# Machines differ in speed: no test fails for being slow.
settings.register_profile(
    "default", max_examples=_USUAL // 3, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", settings.get_profile("default"), max_examples=3 * _USUAL)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def examples(number: int, **more: Any) -> settings:  # Any: options of settings
    """Return the settings of a law that asks for `number` examples, in the profile's proportion.

    It is never less than 10, unless the law asks for less.

    >>> examples(300).max_examples == 3 * settings.default.max_examples
    True
    """
    scaled = number * settings.default.max_examples // _USUAL
    return settings(max_examples=max(scaled, min(number, _LEAST)), **more)
