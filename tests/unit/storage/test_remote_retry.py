"""Which failures are repeated, after which wait, and what people are told."""

import pytest

from penstock.storage.retry import delay_s, failure_of, parse


class GenericError(Exception):
    """Named as the client names its own."""


class PermissionDeniedError(Exception):
    """Named as the client names its own."""


def told(status: int) -> str:
    return f"Error performing GET http://h/x?sig=secret - Server returned non-2xx status code: {status} No"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_repeated(status: int) -> None:
    failure = failure_of(GenericError(told(status)))
    assert (failure.permanent, failure.status) == (False, status)
    assert failure.overloaded == (status in (429, 503))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (GenericError(told(400)), "address"),
        (GenericError(told(301)), "address"),
        (ValueError("an impossible path"), "address"),
        (FileNotFoundError(told(404)), "upload finished"),
        (PermissionDeniedError(told(403)), "rights"),
        (
            GenericError("error sending request for http://169.254.169.254/latest/api/token"),
            "AWS_ACCESS_KEY_ID",
        ),
        (GenericError("HTTP error: builder error"), "AWS_ALLOW_HTTP"),
    ],
)
def test_what_will_not_pass_is_not_repeated_and_comes_with_advice(error: Exception, advice: str) -> None:
    failure = failure_of(error)
    assert failure.permanent
    assert advice in failure.advice


def test_the_reason_is_one_short_line_without_signatures_or_dumps() -> None:
    reason = failure_of(GenericError(told(500) + "\n\nDebug source:\nGeneric { token: secret }")).reason
    assert "secret" not in reason
    assert "\n" not in reason
    assert len(failure_of(GenericError("x" * 10_000)).reason) == 400


def test_waits_grow_to_a_limit_with_jitter_that_is_the_same_each_time() -> None:
    waits = [delay_s(attempt, key=("object", 0), first_s=1.0, most_s=10.0) for attempt in range(1, 100)]
    for attempt, wait in enumerate(waits):
        longest = min(10.0, 2.0**attempt)
        assert longest / 2 <= wait <= longest
    assert waits == [
        delay_s(attempt, key=("object", 0), first_s=1.0, most_s=10.0) for attempt in range(1, 100)
    ]
    assert waits[0] != delay_s(1, key=("object", 1), first_s=1.0, most_s=10.0)


def test_the_server_is_given_the_time_it_asks_for() -> None:
    assert delay_s(1, key=("object", 0), first_s=0.1, most_s=1.0, retry_after_s=7.0) == 7.0
    assert delay_s(9, key=("object", 0), first_s=5.0, most_s=60.0, retry_after_s=0.0) >= 30.0


def test_an_overloaded_server_is_given_more_than_a_blink() -> None:
    assert delay_s(1, key=("object", 0), first_s=0.01, most_s=20.0, overloaded=True) >= 0.5


@pytest.mark.parametrize("value", [None, "", "soon", "-1", "Thu, 99 Jan 1970 00:00:00 GMT"])
def test_a_wait_that_is_none_is_passed_over(value: str | None) -> None:
    assert parse(value, now_s=0.0) is None


def test_a_date_in_the_past_is_no_wait() -> None:
    assert parse("Thu, 01 Jan 1970 00:00:01 GMT", now_s=100.0) == 0.0
