"""JSON of the console's answers: whatever a run's files hold can be sent."""

import math
from typing import Any

from starlette.responses import JSONResponse


class PlainJson(JSONResponse):
    """JSON in which NaN and infinities are null, and halves of surrogate pairs are escaped in the text."""

    def render(self, content: Any) -> bytes:  # Any: JSON, and what Python's json reads besides
        """Return the body."""
        try:
            return super().render(content)
        except ValueError:  # rare: most answers need no copy
            return super().render(_plain(content))


def _plain(value: Any) -> Any:  # Any: JSON
    """Return JSON without what no reader of JSON takes.

    >>> _plain({"peak": float("nan"), "dir": ["caf\\udce9"]})
    {'peak': None, 'dir': ['caf\\\\udce9']}
    """
    if isinstance(value, dict):
        return {_plain(str(name)): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
