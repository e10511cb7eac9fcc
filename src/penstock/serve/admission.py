"""Admission control: the number of open answers, and the Retry-After of refused clients."""

import math
from collections import deque

from penstock.serve.errors import ApiError

_REMEMBERED = 64
"""Number of finished answers from which the rate is measured."""
_LONGEST_WAIT_S = 60


class Admission:
    """Admission control: counts open answers and measures how fast they finish.

    Args:
        max_open: maximum open answers.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        self.num_open = 0

    def enter(self, num_answers: int, *, now_s: float) -> None:
        """Admit answers; each must `leave` again.

        Raises:
            ApiError: 429 with Retry-After; 400 if the request can never be admitted.
        """
        if num_answers > self._max_open:
            raise ApiError(
                f"The request asks for {num_answers:,} answers, and the server allows "
                f"{self._max_open:,} at once. Split it into several requests.",
            )
        if self.num_open + num_answers > self._max_open:
            raise ApiError(
                f"The server has {self.num_open:,} open answers and allows {self._max_open:,}. "
                "Try again later.",
                status=429,
                code="overloaded",
                retry_after_s=self.retry_after_s(num_answers, now_s=now_s),
            )
        self.num_open += num_answers

    def leave(self, num_answers: int, *, now_s: float) -> None:
        """Count answers as finished."""
        self.num_open -= num_answers
        self._ends.extend([now_s] * min(num_answers, _REMEMBERED))

    def retry_after_s(self, num_answers: int, *, now_s: float) -> int:
        """Return the estimated seconds until there is room, 1 to 60, from the rate of finished answers.

        >>> admission = Admission(max_open=4)
        >>> admission.enter(4, now_s=0.0)
        >>> admission.retry_after_s(2, now_s=0.0)
        1
        >>> for end_s in (0.0, 5.0, 10.0): admission.leave(1, now_s=end_s); admission.enter(1, now_s=end_s)
        >>> admission.retry_after_s(2, now_s=10.0)
        10
        """
        if len(self._ends) < 2 or now_s <= self._ends[0]:
            return 1
        per_s = (len(self._ends) - 1) / (now_s - self._ends[0])
        excess = self.num_open + num_answers - self._max_open
        return max(1, min(_LONGEST_WAIT_S, math.ceil(excess / per_s)))
