"""Admission, and when to come back."""

import pytest

from penstock.core.errors import ConfigError
from penstock.serve.admission import Admission
from penstock.serve.errors import ApiError
from penstock.serve.limits import ServerLimits


def test_more_than_may_be_open_are_told_when_to_come_back():
    admission = Admission(max_open=3)
    admission.enter(2, now_s=0.0)
    with pytest.raises(ApiError, match="2 open answers and allows 3") as refused:
        admission.enter(2, now_s=0.0)
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    assert refused.value.response().headers["Retry-After"] == "1"
    admission.enter(1, now_s=0.0)


def test_what_never_fits_is_a_mistake_and_not_overload():
    with pytest.raises(ApiError, match="asks for 4 answers, and the server allows 3") as refused:
        Admission(max_open=3).enter(4, now_s=0.0)
    assert refused.value.status == 400


def test_answers_that_left_make_room():
    admission = Admission(max_open=1)
    for now_s in range(5):
        admission.enter(1, now_s=now_s)
        admission.leave(1, now_s=now_s)
    assert admission.num_open == 0


@pytest.mark.parametrize(("every_s", "expected"), [(0.1, 1), (4.0, 4), (1000.0, 60)])
def test_the_wait_follows_the_measured_rate(every_s, expected):
    admission = Admission(max_open=1)
    for index in range(10):
        admission.enter(1, now_s=index * every_s)
        admission.leave(1, now_s=index * every_s)
    admission.enter(1, now_s=9 * every_s)
    assert admission.retry_after_s(1, now_s=9 * every_s) == expected


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="max_open must be positive"):
        ServerLimits(max_open=0)
