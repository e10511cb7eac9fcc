"""What one request, and all together, may take; no torch."""

import math
from collections import deque
from dataclasses import dataclass

from penstock.core.errors import ConfigError
from penstock.serve.errors import ApiError

_REMEMBERED = 64
"""Ends of answers from which the rate is measured."""
_LONGEST_WAIT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every default is generous to an honest client and finite."""

    max_body_bytes: int = 4 * 2**20
    """Of a request's JSON."""
    body_timeout_s: float = 20.0
    """For a body to arrive, and for the lines before it."""
    max_prompts: int = 128
    """Prompts of one request."""
    max_texts: int = 2048
    """Texts of one request for vectors, of which `max_prompts` are computed at a time."""
    max_output_tokens: int | None = None
    """Tokens of one answer; None: what the context has room for."""
    max_answers: int = 16
    """`n`."""
    max_stops: int = 16
    """Stop texts, of at most `max_stop_characters` each."""
    max_stop_characters: int = 256
    max_open: int = 1024
    """Answers that are being made or wait, over all clients; more get 429."""
    deadline_s: float | None = 600.0
    """For a whole request, waiting included; None: none."""

    def __post_init__(self) -> None:
        """Refuse what would refuse everything."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:  # NaN is not
                raise ConfigError(f"{name} must be positive", got=value)


class Admission:
    """Counts answers that are open, and knows how fast they end.

    Args:
        max_open: answers at once.
    """

    def __init__(self, max_open: int) -> None:
        self._max_open = max_open
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        self.num_open = 0

    def enter(self, num_answers: int, *, now_s: float) -> None:
        """Count answers in; each must `leave` again.

        Raises:
            ApiError: 429, saying when to come back; 400 where that would never help.
        """
        if num_answers > self._max_open:
            raise ApiError(
                400,
                f"The request asks for {num_answers:,} answers, and the server makes at most "
                f"{self._max_open:,} at once. Ask in several requests.",
            )
        if self.num_open + num_answers > self._max_open:
            raise ApiError(
                429,
                f"The server has {self.num_open:,} answers to make and takes at most {self._max_open:,}. "
                "Try again later.",
                code="overloaded",
                retry_after_s=self.retry_after_s(num_answers, now_s=now_s),
            )
        self.num_open += num_answers

    def leave(self, num_answers: int, *, now_s: float) -> None:
        """Count answers out."""
        self.num_open -= num_answers
        self._ends.extend([now_s] * min(num_answers, _REMEMBERED))

    def retry_after_s(self, num_answers: int, *, now_s: float) -> int:
        """Return when there should be room, by how fast the last answers ended; from 1 to 60.

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
