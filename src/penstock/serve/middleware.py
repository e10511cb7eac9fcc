"""Middleware: origin, API key and body of every request; cancels the answers of clients that disconnect.

Plain ASGI, because a stream must not be copied through layers. Once the body has arrived, a task waits for
the client to disconnect and then cancels the request's answers, whatever its route is waiting for. When the
request is over, for any reason, none of its answers continues.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.core import clock
from penstock.core.api_keys import Keys
from penstock.core.listen import host_name, is_loopback
from penstock.core.log import EventLog
from penstock.serve.errors import ApiError, ending, unexpected
from penstock.serve.output_stream import OutputStream
from penstock.serve.request_body import Bodies, check_unicode, replay

log = EventLog(__name__)

OPEN_TO_ALL = frozenset({"/", "/docs", "/health", "/ready", "/page.css", "/page.js", "/chat.js", "/dom.js"})
"""Routes without authentication: health probes, the web page where a user enters a key, the API reference."""
REQUEST_ID = "x-request-id"
"""Taken from a gateway's header, sent back, and logged."""
_SAFE_ID = re.compile(r"[\w.:/+=-]{1,128}", re.ASCII)
_CLIENT_LEFT = 499
"""Status of a request whose client disconnected, as in nginx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPolicy:
    """API keys, allowed origins, and the address that is listened at."""

    keys: Keys | None = None
    """None: no authentication."""
    origins: frozenset[str] = frozenset()
    """Origins of web pages that may send requests, such as `https://chat.example.com`; "*": all."""
    host: str = ""
    """Address that the server listens at. On loopback, and without keys, requests must name this machine."""


@dataclass(slots=True, kw_only=True, eq=False)
class RequestContext:
    """Context of one HTTP request, in `request.state.visit`."""

    client: str
    """Name of its API key, or the client's address."""
    answers: list[OutputStream] = field(default_factory=list)
    """Output streams of the request."""
    is_over: bool = False
    cut_by: int | None = None
    """Status of the error that cut its stream."""

    def opened(self, answers: OutputStream) -> OutputStream:
        """Register answers to be cancelled when the request ends; return them."""
        self.answers.append(answers)
        if self.is_over:
            answers.cancel()
        return answers

    def end(self) -> None:
        """Cancel all unfinished answers."""
        self.is_over = True
        for answers in self.answers:
            answers.cancel()


class _Reply:
    """Sends a response, and records its status and whether it is complete."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status: int | None = None
        """None: it has not begun."""
        self.is_whole = False
        self.left = asyncio.Event()
        """Set when the client disconnects."""
        self._send = send

    async def __call__(self, message: Message) -> None:
        """Send an ASGI message, with the request id in the headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            named = (REQUEST_ID.encode(), self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), named]}
        elif message["type"] == "http.response.body":
            self.is_whole = not (message.get("more_body", False) or self.left.is_set())
        await self._send(message)

    def outcome(self, cut_by: int | None) -> int:
        """Return the status to count: that of the error for a stream that was cut, 499 if the client left.

        Args:
            cut_by: status of an error that was the stream's last event.
        """
        if self.status is None or (self.left.is_set() and not self.is_whole):
            return _CLIENT_LEFT
        return cut_by or (self.status if self.is_whole else ending().status)


class RequestMiddleware:
    """ASGI middleware around the application.

    Args:
        on_done: called with (route, status, seconds) of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        rules: AccessPolicy,
        bodies: Bodies,
        on_done: Callable[[str, int, float], None],
    ) -> None:
        self._app = app
        self._rules = rules
        self._bodies = bodies
        self._on_done = on_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, headers = clock.monotonic(), Headers(scope=scope)
        reply = _Reply(send, request_id_of(headers.get(REQUEST_ID)))
        scope = _as_routed(scope)
        try:
            await self._pass(scope, headers, receive, reply)
        except ApiError as error:
            await error.response()(scope, receive, reply)
        except asyncio.CancelledError:  # shutdown, after waiting for this client
            log.warning(
                "request_cut",
                "Request {id} to {route} was cut: the server ends",
                id=reply.request_id,
                route=_route_of(scope),
            )
            if reply.status is None:
                await ending().response()(scope, receive, reply)
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:  # also a Rust panic; an Exception was answered and logged before
            if reply.status is None:
                await unexpected(error).response()(scope, receive, reply)
            elif not reply.is_whole:  # the connection must close, so that a truncated response is noticed
                raise
        finally:
            self._done(scope, reply, clock.monotonic() - began_s)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, reply: _Reply) -> None:
        check_host(headers, self._rules)
        check_origin(headers, self._rules)
        visit = RequestContext(client=self._client_of(scope, headers))
        scope.setdefault("state", {})["visit"] = visit
        body = await self._bodies.read(receive, headers)
        if body is None:
            return
        check_unicode(body)
        watch = asyncio.create_task(_watch(receive, visit, reply.left))
        try:
            await self._app(scope, replay(body, reply.left), reply)
        finally:
            visit.end()
            watch.cancel()

    def _done(self, scope: Scope, reply: _Reply, seconds: float) -> None:
        route, visit = _route_of(scope), scope.get("state", {}).get("visit")
        status = reply.outcome(None if visit is None else visit.cut_by)
        log.debug(
            "request",
            "Request {id} to {route} of {client!r} ended with {status} after {duration_s:.3f} s",
            id=reply.request_id,
            route=route,
            client="" if visit is None else visit.client,
            status=status,
            duration_s=seconds,
        )
        self._on_done(route, status, seconds)

    def _client_of(self, scope: Scope, headers: Headers) -> str:
        address = scope.get("client") or ("",)
        if self._rules.keys is None or scope["path"] in OPEN_TO_ALL or scope["method"] == "OPTIONS":
            return str(address[0])
        client = self._rules.keys.client_of(headers.get("authorization"))
        if client is None:
            raise ApiError(
                "No API key, or one the server does not know. Send `Authorization: Bearer KEY`.",
                status=401,
                code="invalid_api_key",
            )
        return client


def request_id_of(given: str | None) -> str:
    """Return the id that a gateway gave a request, or a new one.

    >>> request_id_of("gw-17"), len(request_id_of("two words"))
    ('gw-17', 20)
    """
    return given if given and _SAFE_ID.fullmatch(given) else f"req_{secrets.token_hex(8)}"


def check_host(headers: Headers, rules: AccessPolicy) -> None:
    """Refuse requests to another name where only this machine is listened to, and those that name two.

    A web page can point its own name at 127.0.0.1 after loading (DNS rebinding). Its requests then have no
    foreign origin, but that name.

    Raises:
        ApiError: 400, 403.
    """
    if len(named := headers.getlist("host")) > 1:
        raise ApiError("The request has several Host headers. Send one.", code="bad_host")
    if not named or rules.keys is not None or "*" in rules.origins or not is_loopback(rules.host):
        return
    name = host_name(named[0])
    if not is_loopback(name) and name not in {urlsplit(origin).hostname for origin in rules.origins}:
        raise ApiError(
            f"This server is not {named[0][:200]!r}. Open it at {rules.host}, or start it with --cors and "
            "the origin of the proxy in front.",
            status=403,
            code="host_not_allowed",
        )


def check_origin(headers: Mapping[str, str], rules: AccessPolicy) -> None:
    """Refuse requests of web pages from other origins; programs other than browsers send no origin.

    Without API keys, the server's own page must also have a loopback host name. Otherwise DNS rebinding
    works: the name of a foreign page, pointed at 127.0.0.1 after loading, would be the server's own origin.

    Raises:
        ApiError: 403.
    """
    origin = headers.get("origin")
    if origin is None or origin in rules.origins or "*" in rules.origins:
        return
    parts = urlsplit(origin)
    is_own = parts.netloc != "" and parts.netloc == headers.get("host")
    if is_own and (rules.keys is not None or is_loopback(parts.hostname)):
        return
    raise ApiError(
        f"Web pages of {origin[:200]!r} may not use this server. Start it with --cors and that origin.",
        status=403,
        code="origin_not_allowed",
    )


async def _watch(receive: Receive, visit: RequestContext, left: asyncio.Event) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    left.set()
    visit.end()


def _as_routed(scope: Scope) -> Scope:
    """Return the scope for routing: HEAD as GET (the connection drops its body), no trailing slash."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": scope["path"].rstrip("/") or "/"}


def _route_of(scope: Scope) -> str:
    """Return the pattern of the route, of which there are few, not the path that a client sent."""
    route = scope.get("route")
    return str(getattr(route, "path", "none"))
