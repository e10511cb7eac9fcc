"""HTTPS requests of a pod, with the bearer token and certificate authority that are mounted into it."""

import http.client
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 10.0
"""Limit of a connection, and of each read of an answer."""


class Refused(Exception):
    """The server did not do what was asked."""

    def __init__(self, status: int, body: bytes, *, retry_after_s: float | None) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s

    @property
    def is_passing(self) -> bool:
        """True if the same request may succeed later."""
        return self.status == http.client.TOO_MANY_REQUESTS or self.status >= 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Files of a pod; they are read at each request, because their content changes while the pod runs."""

    ca_file: Path
    """Certificate authority of the server."""
    token_file: Path
    """Bearer token."""


def send(method: str, url: str, body: bytes, credentials: Credentials, *, content_type: str) -> bytes:
    """Send a request and return the body of the answer; follows no redirect and uses no proxy.

    Raises:
        Refused: the answer is no success.
        OSError: no connection, or a file that cannot be read.
        http.client.HTTPException: the answer is not HTTP.
        ValueError: the address is not one of HTTPS; a token is never sent in the clear.
    """
    address = urlsplit(url)
    if address.scheme != "https" or not address.hostname:
        raise ValueError(f"the address is not https:// ({url!r})")
    token = credentials.token_file.read_text().strip()
    trust = ssl.create_default_context(cafile=str(credentials.ca_file))
    connection = http.client.HTTPSConnection(address.hostname, address.port, timeout=TIMEOUT_S, context=trust)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
    try:
        connection.request(method, address.path or "/", body, headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if not 200 <= answer.status < 300:
        waits = answer.getheader("Retry-After", "")
        raise Refused(answer.status, content, retry_after_s=float(waits) if waits.isdecimal() else None)
    return content
