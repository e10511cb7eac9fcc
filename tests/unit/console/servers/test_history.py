"""Rates and quantiles between readings, restarts, and servers that fail for a while."""

import math

import pytest

from penstock.console.servers.history import FIRST, ServerHistory, point_of, quantile
from penstock.console.servers.scrape import Reading, Server
from penstock.core import clock
from penstock.core.errors import PenstockError

SERVER = Server(name="s", url="http://127.0.0.1:1")


def reading(tokens, *, drafted=0.0, accepted=0.0, first=((0.1, 0.0), (math.inf, 0.0))):
    values = {
        "penstock_answers_waiting": 1.0,
        "penstock_answers_running": 4.0,
        "penstock_cache_blocks": 10.0,
        "penstock_cache_blocks_used": 5.0,
        "penstock_answer_tokens_total": tokens,
        "penstock_computed_tokens_total": 2 * tokens,
        "penstock_drafted_tokens_total": drafted,
        "penstock_accepted_tokens_total": accepted,
    }
    return Reading(values, {FIRST: first})


@pytest.fixture
def now(monkeypatch):
    """A clock that a test moves."""
    at = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: at[0])
    return at


def test_gauges_are_there_at_once_and_rates_with_the_second_reading():
    first = point_of(0.0, reading(100.0), None)
    assert (first["waiting"], first["running"], first["cache"]) == (1, 4, 0.5)
    assert first["answer_tokens_per_s"] is None
    later = reading(160.0, drafted=10.0, accepted=4.0, first=((0.1, 4.0), (math.inf, 4.0)))
    second = point_of(3.0, later, (0.0, reading(100.0)))
    assert (second["answer_tokens_per_s"], second["computed_tokens_per_s"]) == (20, 40)
    assert second["accepted"] == pytest.approx(0.4)
    assert second["first_p50"] == pytest.approx(0.05)
    assert second["between_p50"] is None, "the page has no such histogram"


@pytest.mark.parametrize(
    ("share", "value"), [(0.25, 0.05), (0.5, 0.1), (0.625, 0.15), (0.75, 0.2), (0.99, 0.2)]
)
def test_a_quantile_is_linear_in_its_bucket_and_ends_at_the_last_known_edge(share, value):
    assert quantile(((0.1, 4.0), (0.2, 6.0), (math.inf, 8.0)), share) == pytest.approx(value)


def test_an_empty_histogram_has_no_quantile():
    assert quantile(((0.1, 0.0), (math.inf, 0.0)), 0.5) is None
    assert quantile((), 0.5) is None


def test_pages_that_look_at_the_same_time_share_a_reading(now):
    asked = []
    history = ServerHistory(SERVER, read=lambda server: asked.append(server) or reading(1.0))
    assert history.points() == history.points()
    now[0] += 1.0
    assert [point["time"] for point in history.points()] == [100.0, 101.0]
    assert [point["time"] for point in history.points(after=100.0)] == [101.0]
    assert len(asked) == 2


def test_a_restart_begins_anew_instead_of_a_negative_rate(now):
    tokens = iter([100.0, 200.0, 5.0, 15.0])
    history = ServerHistory(SERVER, read=lambda _: reading(next(tokens)))
    for _ in range(4):
        points = history.points()
        now[0] += 1.0
    assert [point["answer_tokens_per_s"] for point in points] == [None, 100.0, None, 10.0]


def test_a_failure_is_said_until_the_server_is_back(now):
    def read(_):
        if now[0] == 101.0:
            raise PenstockError("it does not answer")
        return reading(now[0])

    history = ServerHistory(SERVER, read=read)
    history.points()
    now[0] += 1.0
    assert (len(history.points()), history.error) == (1, "it does not answer.")
    now[0] += 1.0
    assert (len(history.points()), history.error) == (2, "")


def test_the_history_is_bounded(now):
    history = ServerHistory(SERVER, read=lambda _: reading(now[0]))
    for _ in range(3700):
        history.points(after=math.inf)
        now[0] += 1.0
    assert len(history.points()) == 3600
