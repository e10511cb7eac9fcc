"""JSON of the console's answers: whatever a run's files hold can be sent."""

from typing import Any

from starlette.responses import JSONResponse

from penstock.obs.run_data.page_json import plain_json


class PlainJson(JSONResponse):
    """JSON in which NaN and infinities are null, and halves of surrogate pairs are escaped in the text."""

    def render(self, content: Any) -> bytes:  # Any: JSON, and what Python's json reads besides
        """Return the body."""
        try:
            return super().render(content)
        except ValueError:  # rare: most answers need no copy
            return super().render(plain_json(content))
