"""Retries of failed requests: exponential backoff, and a server's Retry-After.

Delays grow exponentially with jitter, so that ranks that fail together do not retry together. The jitter is a
function of the request, not of a generator, so a run's behaviour is reproducible from its log.

The client library ignores `Retry-After` and does not expose the headers of an error response, so one HEAD
request per refusal reads it. Only for http and https: the throttling responses of S3 and GCS have none.
"""

import email.utils
import http.client
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message

from penstock.core import clock
from penstock.core.rng import key_of

_STATUS = re.compile(r"status code: (\d{3})")
_RETRIED_4XX = (408, 425, 429)
_OVERLOADED = (429, 503)
_OVERLOADED_DELAY_S = 1.0  # minimum first delay after a "too many requests" response
_QUERY = re.compile(r"\?\S*")
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google", "redential")


@dataclass(frozen=True, slots=True)
class Failure:
    """Result of a failed attempt."""

    reason: str
    """One line for the user, without secrets."""
    status: int | None = None
    """HTTP status, if the server responded."""
    permanent: bool = False
    """True if a retry is pointless."""
    advice: str = ""
    """Remedy for the user; for permanent failures."""

    @property
    def overloaded(self) -> bool:
        """True if the server asked for fewer requests."""
        return self.status in _OVERLOADED


def client_errors() -> tuple[type[Exception], ...]:
    """Return what the object store's client raises; it must be installed."""
    from obstore.exceptions import BaseError  # optional

    return BaseError, OSError, ValueError


def failure_of(error: BaseException) -> Failure:
    """Classify an error of the object store's client by its type and message."""
    # The message ends in a dump of the client's state, and an address may contain a signature.
    reason = _QUERY.sub("?...", " ".join(str(error).partition("Debug source")[0].split()))[:400]
    kind = type(error).__name__
    found = _STATUS.search(reason)
    status = int(found[1]) if found else None
    if kind == "FileNotFoundError":
        return Failure(reason, 404, permanent=True, advice="Check the address, and that the upload finished.")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        advice = (
            "Check the rights of the credentials in the environment; for a public bucket of S3 set "
            "AWS_SKIP_SIGNATURE=true."
        )
        return Failure(reason, status, permanent=True, advice=advice)
    if kind == "NotSupportedError":
        advice = "The server must answer range requests: serve the corpus from one that does."
        return Failure(reason, status, permanent=True, advice=advice)
    if status is None and any(word in str(error) for word in _NO_CREDENTIALS):
        advice = (
            "No credentials were found: set those of your store (AWS_ACCESS_KEY_ID and so on), or "
            "AWS_SKIP_SIGNATURE=true for a public bucket of S3."
        )
        return Failure("there are no credentials for it", permanent=True, advice=advice)
    if "builder error" in reason:
        advice = (
            "An endpoint without https must be allowed, where the network is trusted: "
            "PENSTOCK_ALLOW_HTTP=1, or AWS_ALLOW_HTTP=true."
        )
        return Failure(reason, permanent=True, advice=advice)
    if isinstance(error, ValueError) or (status and 300 <= status < 500 and status not in _RETRIED_4XX):
        return Failure(reason, status, permanent=True, advice="Check the address.")
    return Failure(reason, status)


def delay_s(
    attempt: int,
    *,
    key: tuple[str | int, ...],
    first_s: float,
    most_s: float,
    overloaded: bool = False,
    retry_after_s: float | None = None,
) -> float:
    """Return the delay before the next attempt in seconds.

    Args:
        attempt: number of failed attempts, at least 1.
        key: identifies the request and its sender; keys the jitter.
        retry_after_s: delay that the server asked for; the result is never less.


    >>> 0.1 <= delay_s(1, key=("a", 0), first_s=0.2, most_s=20.0) <= 0.2
    True
    """
    first_s = max(first_s, min(_OVERLOADED_DELAY_S, most_s)) if overloaded else first_s
    longest = min(most_s, first_s * 2.0 ** min(attempt - 1, 30))
    jitter = key_of(0, "retry", *key, attempt) / 2**64
    wait = longest * (0.5 + 0.5 * jitter)
    return wait if retry_after_s is None else max(wait, retry_after_s)


def retry_after_s(url: str, *, timeout_s: float) -> float | None:
    """Return the seconds in the Retry-After header of `url` now; None if there is none."""
    request = urllib.request.Request(url, method="HEAD")  # the caller has checked the scheme
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as answer:
            headers = answer.headers
    except urllib.error.HTTPError as error:
        headers = error.headers
        error.close()
    except (OSError, http.client.HTTPException):
        return None
    return parse(headers.get("Retry-After"), now_s=clock.unix_seconds())


def parse(value: str | None, *, now_s: float) -> float | None:
    """Parse a Retry-After header: seconds, or a date (RFC 9110, 10.2.3); None if it is neither.

    >>> parse("7", now_s=0.0), parse("Thu, 01 Jan 1970 00:01:00 GMT", now_s=10.0), parse("soon", now_s=0.0)
    (7.0, 50.0, None)
    """
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now_s)
    except (ValueError, TypeError):
        return None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(  # the name and arguments are urllib's
        self, req: urllib.request.Request, fp: object, code: int, msg: str, headers: Message, newurl: str
    ) -> None:
        """Follow no redirect: another address may have another delay."""
