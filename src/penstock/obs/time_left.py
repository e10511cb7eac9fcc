"""Time left of a run, estimated from the steps that this process has done."""


class TimeLeft:
    """Estimate from the mean time of a step; the first step is left out, because it is slower.

    Args:
        steps: steps of the whole run.

    >>> left = TimeLeft(steps=10)
    >>> left.after(1, now=60.0), left.after(3, now=64.0), left.after(10, now=78.0)
    (None, 14.0, 0.0)
    """

    def __init__(self, *, steps: int) -> None:
        self._steps = steps
        self._first: tuple[int, float] | None = None

    def after(self, step: int, *, now: float) -> float | None:
        """Return the seconds left after a step; None after the first, from which nothing follows.

        Args:
            now: time at its end, in seconds.
        """
        self._first = self._first or (step, now)
        first, since = self._first
        if step >= self._steps:
            return 0.0
        return None if step <= first else (self._steps - step) * (now - since) / (step - first)
