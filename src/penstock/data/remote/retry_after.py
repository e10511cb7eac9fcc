"""Ask a web server how long it wants to be left alone.

The client library follows no `Retry-After` and shows no headers of a failed answer, so one HEAD request
per refusal reads it. Only for http and https: the throttling answers of S3 and GCS carry none.
"""

import email.utils
import http.client
import urllib.error
import urllib.request
from email.message import Message

from penstock.core import clock


def retry_after_s(url: str, *, timeout_s: float) -> float | None:
    """Return the seconds that the server of `url` asks to wait now; None where it says nothing."""
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
    """Read the header: seconds, or a date (RFC 9110, 10.2.3); None where it is neither.

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
        """Follow nothing: another address may want another wait."""
