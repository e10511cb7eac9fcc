"""When a failed request is repeated, and how long to wait first: pure arithmetic.

Waits grow exponentially with jitter, so that many ranks that fail together do not come back together. The
jitter is a function of who asks for what, not of a generator: a run's behaviour can be told from its log.
"""

import re
from dataclasses import dataclass

from penstock.core.rng import key_of

_STATUS = re.compile(r"status code: (\d{3})")
_RETRIED_4XX = (408, 425, 429)
_OVERLOADED = (429, 503)
_OVERLOADED_DELAY_S = 1.0  # a server that says "too many" wants more than a blink
_QUERY = re.compile(r"\?\S*")
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google", "redential")


@dataclass(frozen=True, slots=True)
class Failure:
    """What an attempt ended with."""

    reason: str
    """One line for people, without secrets."""
    status: int | None = None
    """Of the server's answer, where there was one."""
    permanent: bool = False
    """Whether repeating it is pointless."""
    advice: str = ""
    """What the user can do; for permanent failures."""

    @property
    def overloaded(self) -> bool:
        """Whether the server asked for fewer requests."""
        return self.status in _OVERLOADED


def failure_of(error: BaseException) -> Failure:
    """Judge an error of the object store's client by its type and its words."""
    # The client's words end in a dump of its own state, and an address may carry a signature.
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
    """Return the wait before the next attempt.

    Args:
        attempt: attempts that failed so far, at least 1.
        key: names the request and the one who makes it; keys the jitter.
        retry_after_s: what the server asked for; the wait is never shorter.

    >>> 0.1 <= delay_s(1, key=("a", 0), first_s=0.2, most_s=20.0) <= 0.2
    True
    """
    first_s = max(first_s, min(_OVERLOADED_DELAY_S, most_s)) if overloaded else first_s
    longest = min(most_s, first_s * 2.0 ** min(attempt - 1, 30))
    jitter = key_of(0, "retry", *key, attempt) / 2**64
    wait = longest * (0.5 + 0.5 * jitter)
    return wait if retry_after_s is None else max(wait, retry_after_s)
