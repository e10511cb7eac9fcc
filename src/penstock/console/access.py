"""Access to the console: which hosts, origins and clients may ask; every response's security headers.

The console reads recipes and samples, and may send requests to jobs, so a web page of another origin must
reach neither. A browser shows where a request comes from in two headers that pages cannot set:

- `Host`: a page whose name resolves to this machine later (DNS rebinding) still sends its own name. Only
  names of this machine, and of a proxy in front, are served; addresses too where the console listens on all
  of them, since a page cannot be rebound to a number.
- `Origin`: every POST must carry the console's own, and JSON, which no form can send.

With a key file, each browser shows a key once, and gets a random cookie, HttpOnly and SameSite=Strict. The
key itself is kept nowhere. Browsers send a host's cookies to all its ports, so the port is in the name of the
cookie: two consoles of one host leave each other's readers signed in. Without a key file, the console listens
on this machine only. After some wrong keys of a client, the next wrong ones get the time to wait
(wrong_keys.py). A right key always opens: behind a proxy, all clients share an address.
"""

import math
import re
import secrets
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.console.wrong_keys import WrongKeys
from penstock.core import clock
from penstock.core.api_keys import Keys
from penstock.core.listen import host_name, is_loopback
from penstock.core.units import plural

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' "
    "data:; connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every response. Pages fetch nothing from elsewhere, and no other page may embed them."""

_MAX_BYTES = 1 << 20
"""Largest request body."""
_MAX_SESSIONS = 10_000
_PORT = re.compile(r":([0-9]{1,5})$")
_EVERYWHERE = frozenset({"", "0.0.0.0", "::"})

# The form is sent to the page's own address, so that the fragment, which names the view, is kept.
_KEY_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Penstock console</title></head>
<body><main><h1>Penstock console</h1>
{said}
<form method="post"><label>Key <input name="key" type="password" autocomplete="current-password"
 required autofocus></label> <button>Open</button></form></main></body></html>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleAccess:
    """Access rules of the console: hosts, keys and rights of its clients."""

    host: str = "127.0.0.1"
    """Address that the console listens at, as the user named it."""
    proxy_name: str = ""
    """Host name of a proxy in front, which passes the Host header on; empty: there is none."""
    keys: Keys | None = None
    """Keys of clients; None: everyone who reaches the console."""
    control: bool = False
    """True if requests to jobs may be sent."""
    names: frozenset[str] = field(default_factory=lambda: frozenset(_own_names()))
    """Names of this machine."""

    @property
    def why_no_models(self) -> str:
        """Why no checkpoint may be opened here; empty: it may.

        An open model takes memory and cores of the machine, and changes nothing. Whoever reaches a console on
        loopback is on the machine already; others need --control.
        """
        if self.control or (is_loopback(self.host) and not self.proxy_name):
            return ""
        return "This console opens no models for other machines. Start it with --control to allow it."

    def is_own_host(self, header: str) -> bool:
        """Return whether a Host header names this console.

        >>> access = ConsoleAccess(names=frozenset())
        >>> access.is_own_host("localhost:8400"), access.is_own_host("evil.example:8400")
        (True, False)
        """
        name = host_name(header)
        if name is None:
            return False
        if is_loopback(name) or name in (self.host.lower(), self.proxy_name.lower()):
            return True
        return self.host in _EVERYWHERE and (name in self.names or _is_number(name))


class AccessMiddleware:
    """ASGI middleware that refuses what the rules do not allow, and adds the security headers."""

    def __init__(self, app: ASGIApp, rules: ConsoleAccess) -> None:
        self._app = app
        self._rules = rules
        self._sessions: dict[str, str] = {}
        """Cookie -> client."""
        self._wrong_keys = WrongKeys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer, incoming = self._refusal(scope), receive
        if answer is None and scope["method"] not in ("GET", "HEAD"):
            body = await _body(receive)
            if body is None:
                answer = refusal(413, f"A body has at most {_MAX_BYTES:,} bytes.")
            elif self._is_sign_in(scope):
                answer = self._signed_in(body, Headers(scope=scope), _address(scope))
            else:
                incoming = _replayed(body, receive)
        await (answer or self._app)(scope, incoming, send_secured)

    def _is_sign_in(self, scope: Scope) -> bool:
        return self._rules.keys is not None and scope["path"] == "/" and scope["method"] == "POST"

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a request that goes no further; None: it may go on."""
        headers, is_read = Headers(scope=scope), scope["method"] in ("GET", "HEAD")
        if len(named := headers.getlist("host")) > 1:
            return refusal(400, "The request has several Host headers. Send one.")
        host = named[0] if named else ""
        if not self._rules.is_own_host(host):
            return refusal(403, f"This console is not {host!r}. Open it by the address that it printed.")
        if not is_read and not _is_own_origin(headers.get("origin", ""), host):
            return refusal(403, "Only the console's own pages may send this: the Origin header is another.")
        if self._rules.keys is None:
            scope["client_name"] = ""
        elif self._is_sign_in(scope):
            return None
        elif (client := self._client_of(headers, _address(scope))) is None:
            if scope["path"] == "/" and is_read:
                return _key_page()
            if _has_key(headers.get("authorization")) and (wait_s := self._wait_s(_address(scope))):
                return refusal(429, _later(wait_s), {"retry-after": str(wait_s)})
            return refusal(
                401, "This console needs a key. Open its first page, or send it as a bearer token."
            )
        else:
            scope["client_name"] = client
        if not is_read and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return refusal(415, "Send application/json.")
        return None

    def _wait_s(self, address: str) -> int:
        """Return the whole seconds until a wrong key of this client counts as a new attempt."""
        return math.ceil(self._wrong_keys.wait_s(address, now_s=clock.monotonic()))

    def _client_of(self, headers: Headers, address: str) -> str | None:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(cookie_name(headers.get("host", "")))
        except CookieError:
            cookie = None
        if cookie is not None and cookie.value in self._sessions:
            return self._sessions[cookie.value]
        return self._client_of_key(headers.get("authorization"), address)

    def _client_of_key(self, authorization: str | None, address: str) -> str | None:
        """Return the client of a key; None: there is none, or it is wrong, which is counted."""
        assert self._rules.keys is not None
        if not _has_key(authorization):
            return None
        client = self._rules.keys.client_of(authorization)
        if client is not None:
            self._wrong_keys.forget(address)
        elif not self._wait_s(address):
            self._wrong_keys.add(address, now_s=clock.monotonic())
        return client

    def _signed_in(self, body: bytes, headers: Headers, address: str) -> Response:
        given, wait_s = parse_qs(body.decode(errors="replace")).get("key", [""])[0], self._wait_s(address)
        client = self._client_of_key(f"Bearer {given}", address)
        if client is None and wait_s:
            return _key_page(_later(wait_s), 429, {"retry-after": str(wait_s)})
        if client is None:
            return _key_page("This console does not know that key.")
        token = secrets.token_urlsafe(32)
        if len(self._sessions) >= _MAX_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        self._sessions[token] = client
        answer = RedirectResponse("./", 303)
        answer.set_cookie(
            cookie_name(headers.get("host", "")),
            token,
            httponly=True,
            samesite="strict",
            path="/",
            secure=headers.get("origin", "").startswith("https:"),  # through a proxy with TLS
        )
        return answer


def cookie_name(host: str) -> str:
    """Return the name of the cookie of a console, by the Host header that a browser sends to it.

    >>> cookie_name("localhost:8400"), cookie_name("[::1]:8401"), cookie_name("runs.example")
    ('penstock-console-8400', 'penstock-console-8401', 'penstock-console')
    """
    port = _PORT.search(host)
    return f"penstock-console-{port[1]}" if port else "penstock-console"


def _has_key(authorization: str | None) -> bool:
    """Return whether a header has a key; a browser sends a proxy's own password (Basic) too."""
    return (authorization or "").partition(" ")[0].lower() == "bearer"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""


def _later(wait_s: int) -> str:
    return f"Too many wrong keys came from this address. Try again in {plural(wait_s, 'second')}."


def _key_page(said: str = "", status: int = 401, headers: Mapping[str, str] | None = None) -> Response:
    """Return the page that asks for a key, with a sentence above the field.

    Under "no-referrer" browsers send its form without an origin.
    """
    alert = f'<p role="alert">{said}</p>' if said else ""
    return HTMLResponse(
        _KEY_PAGE.format(said=alert), status, {"referrer-policy": "same-origin", **(headers or {})}
    )


async def _body(receive: Receive) -> bytes | None:
    """Return the whole body; None: it is too long. A client may declare no length, or a wrong one."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
        if len(body) > _MAX_BYTES:
            return None
    return body


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return an ASGI `receive` that begins with a body that was read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def refusal(status: int, said: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error as JSON."""
    as_text = said.encode(errors="replace").decode()  # a body may have had surrogates
    return JSONResponse({"error": as_text}, status, headers)


def _is_own_origin(origin: str, host: str) -> bool:
    """Return whether an Origin is the console's own, seen from the address that the browser used."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def _is_number(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _own_names() -> Iterable[str]:
    name = socket.gethostname().lower()
    return (name, name.partition(".")[0], socket.getfqdn().lower())
