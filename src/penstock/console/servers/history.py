"""History of a server over the last hour: rates and quantiles between readings of its counters."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock

from penstock.console.servers.scrape import Buckets, Reading, Server, scrape
from penstock.core import clock
from penstock.core.errors import PenstockError

EVERY_S = 1.0
"""Least time between two readings, however many pages look."""
_MOST_POINTS = 3600
_WINDOW_S = 15.0
"""Time over which rates and quantiles are computed: some answers, and still a curve that moves."""

FIRST = "penstock_time_to_first_token_seconds"
BETWEEN = "penstock_inter_token_seconds"

Point = dict[str, float | None]
"""Field -> value; None where it is not known."""
POINT_FIELDS = (
    "time", "waiting", "running", "cache", "answer_tokens_per_s", "computed_tokens_per_s", "accepted",
    "first_p50", "first_p99", "between_p50", "between_p99",
)  # fmt: skip


class ServerHistory:
    """Readings of one server. Thread-safe; pages that look at the same time share a reading.

    Args:
        read: replaces `scrape`.
    """

    def __init__(self, server: Server, *, read: Callable[[Server], Reading] = scrape) -> None:
        self.server = server
        self.error = ""
        """Why the last reading failed; empty: it did not."""
        self._read = read
        self._lock = Lock()
        self._asked = -math.inf
        self._recent: deque[tuple[float, Reading]] = deque()
        self._points: deque[Point] = deque(maxlen=_MOST_POINTS)

    def points(self, *, after: float = -math.inf) -> list[Point]:
        """Return the points after a time, with a new one if the last is old."""
        with self._lock:
            now = clock.monotonic()
            if now - self._asked >= EVERY_S:
                self._asked = now
                self._take(now)
            return [point for point in self._points if (point["time"] or 0.0) > after]

    def known(self) -> list[Point]:
        """Return the points so far; the server is not asked."""
        with self._lock:
            return list(self._points)

    def _take(self, now: float) -> None:
        try:
            reading = self._read(self.server)
        except PenstockError as error:
            self.error = str(error)
            self._recent.clear()
            return
        self.error = ""
        if self._recent and _has_restarted(self._recent[-1][1], reading):
            self._recent.clear()
        while len(self._recent) > 1 and now - self._recent[1][0] >= _WINDOW_S:
            self._recent.popleft()
        before = self._recent[0] if self._recent else None
        self._recent.append((now, reading))
        self._points.append(point_of(now, reading, before))


def point_of(now: float, reading: Reading, before: tuple[float, Reading] | None) -> Point:
    """Return what is drawn at one time: gauges, and rates and quantiles since a reading before.

    Args:
        now: seconds.
        before: time and reading; None: there is none, so counters have no rate.
    """
    values = reading.values
    blocks = values.get("penstock_cache_blocks", 0.0)
    point: Point = {
        "time": now,
        "waiting": values.get("penstock_answers_waiting"),
        "running": values.get("penstock_answers_running"),
        "cache": values.get("penstock_cache_blocks_used", 0.0) / blocks if blocks else None,
    }
    since, old = before if before is not None else (now, reading)
    seconds = now - since

    def grown(name: str) -> float | None:
        if before is None or name not in values:
            return None
        return values[name] - old.values.get(name, 0.0)

    answer, drafted = grown("penstock_answer_tokens_total"), grown("penstock_drafted_tokens_total")
    computed, accepted = grown("penstock_computed_tokens_total"), grown("penstock_accepted_tokens_total")
    point["answer_tokens_per_s"] = None if answer is None or seconds <= 0 else answer / seconds
    point["computed_tokens_per_s"] = None if computed is None or seconds <= 0 else computed / seconds
    point["accepted"] = accepted / drafted if drafted and accepted is not None else None
    for name, metric in (("first", FIRST), ("between", BETWEEN)):
        grown_by = None if before is None else _grown_buckets(reading, old, metric)
        for percent in (50, 99):
            point[f"{name}_p{percent}"] = None if grown_by is None else quantile(grown_by, percent / 100)
    return point


def quantile(buckets: Buckets, share: float) -> float | None:
    """Return a quantile of a histogram, linear within its bucket; None: it is empty.

    Above the last finite edge nothing is known but that edge.

    >>> quantile(((0.1, 5.0), (0.2, 10.0), (float("inf"), 10.0)), 0.75)
    0.15
    """
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for edge, number in buckets:
        if number >= share * total and number > below:
            if math.isinf(edge):
                return low
            return round(low + (edge - low) * (share * total - below) / (number - below), 9)
        low, below = edge if math.isfinite(edge) else low, number
    return low


def _grown_buckets(reading: Reading, old: Reading, metric: str) -> Buckets | None:
    now, before = reading.histograms.get(metric), dict(old.histograms.get(metric, ()))
    if now is None:
        return None
    return tuple((edge, number - before.get(edge, 0.0)) for edge, number in now)


def _has_restarted(old: Reading, new: Reading) -> bool:
    return any(_counts(new.values).get(name, 0.0) < value for name, value in _counts(old.values).items())


def _counts(values: Mapping[str, float]) -> Mapping[str, float]:
    return {name: value for name, value in values.items() if name.endswith(("_total", "_count"))}
