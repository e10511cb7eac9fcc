"""The gate: origins, keys, bodies, and answers that end with their request."""

import asyncio
from types import SimpleNamespace

import pytest

from penstock.core.api_keys import single_key
from penstock.serve.errors import ApiError
from penstock.serve.limits import ServerLimits
from penstock.serve.middleware import AccessPolicy, RequestMiddleware, check_origin
from penstock.serve.request_body import Bodies
from penstock.serve.routes.info import Health
from penstock.serve.sse import EventStream

KEYS = single_key("a-key-of-some-length")
OPEN = AccessPolicy()
LEFT = {"type": "http.disconnect"}
HOST = "127.0.0.1:8000"


@pytest.mark.parametrize(
    ("rules", "host", "origin", "passes"),
    [
        (OPEN, HOST, None, True),
        (OPEN, HOST, "http://127.0.0.1:8000", True),
        (OPEN, "localhost:8000", "http://localhost:8000", True),
        (OPEN, HOST, "https://evil.example", False),
        (OPEN, HOST, "null", False),
        (OPEN, HOST, "http://127.0.0.1:9000", False),
        (OPEN, "evil.example:8000", "http://evil.example:8000", False),  # its name points at 127.0.0.1
        (AccessPolicy(keys=KEYS), "chat.example", "https://chat.example", True),
        (AccessPolicy(origins=frozenset({"https://chat.example"})), HOST, "https://chat.example", True),
        (AccessPolicy(origins=frozenset({"https://chat.example"})), HOST, "https://evil.example", False),
        (AccessPolicy(origins=frozenset({"*"})), HOST, "https://evil.example", True),
    ],
)
def test_only_pages_that_were_let_in_may_ask(rules, host, origin, passes):
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    if passes:
        check_origin(headers, rules)
    else:
        with pytest.raises(ApiError, match="may not use this server"):
            check_origin(headers, rules)


ON_LOOPBACK = AccessPolicy(host="127.0.0.1")


@pytest.mark.parametrize(
    ("rules", "hosts", "status"),
    [
        (ON_LOOPBACK, ["127.0.0.1:8000"], 200),
        (ON_LOOPBACK, ["LocalHost:8000"], 200),
        (ON_LOOPBACK, ["[::1]:8000"], 200),
        (ON_LOOPBACK, [], 200),  # HTTP/1.0
        (ON_LOOPBACK, ["evil.example:8000"], 403),  # its name points at 127.0.0.1
        (ON_LOOPBACK, ["127.0.0.1.evil.example"], 403),
        (ON_LOOPBACK, ["[::1"], 403),
        (AccessPolicy(host="127.0.0.2"), ["evil.example"], 403),
        (AccessPolicy(host="::1", origins=frozenset({"https://chat.example"})), ["chat.example"], 200),
        (AccessPolicy(host="localhost", origins=frozenset({"*"})), ["chat.example"], 200),
        (AccessPolicy(host="0.0.0.0"), ["pod-7.cluster:8000"], 200),
        (ON_LOOPBACK, ["127.0.0.1:8000", "evil.example"], 400),
        (AccessPolicy(host="0.0.0.0"), ["a.example", "b.example"], 400),
    ],
)
@pytest.mark.parametrize("path", ["/", "/metrics", "/v1/models"])
def test_on_loopback_no_route_answers_a_rebound_name(path, rules, hosts, status):
    headers = [(b"host", host.encode()) for host in hosts]
    assert visit(fine, rules=rules, path=path, headers=headers)[0] == status


def receiver(*messages):
    left = list(messages)

    async def receive():
        return left.pop(0) if left else await asyncio.Event().wait()

    return receive


def part(body, more=False):
    return {"type": "http.request", "body": body, "more_body": more}


def test_a_body_is_read_whole():
    receive = receiver(part(b"ab", True), part(b"c"))
    assert asyncio.run(Bodies(ServerLimits()).read(receive, {})) == b"abc"


@pytest.mark.parametrize(
    ("headers", "messages"),
    [
        ({"content-length": "9"}, []),
        ({}, [part(b"12345", True), part(b"6789")]),
        ({"content-length": "x"}, []),
    ],
    ids=["declared", "sent", "nonsense"],
)
def test_a_body_that_is_too_large_is_refused(headers, messages):
    with pytest.raises(ApiError, match="larger than the limit of 8 bytes") as refused:
        asyncio.run(Bodies(ServerLimits(max_body_bytes=8)).read(receiver(*messages), headers))
    assert refused.value.status == 413


def test_a_body_that_does_not_come_is_given_up():
    with pytest.raises(ApiError, match=r"did not arrive within 0.01 seconds") as refused:
        asyncio.run(Bodies(ServerLimits(body_timeout_s=0.01)).read(receiver(part(b"a", True)), {}))
    assert refused.value.status == 408


def test_a_server_that_ends_waits_for_no_body_and_reads_those_that_are_there():
    async def end_meanwhile():
        bodies = Bodies(ServerLimits(body_timeout_s=600))
        waiting = [asyncio.create_task(bodies.read(receiver(part(b"a", True)), {})) for _ in range(3)]
        await asyncio.sleep(0)  # each has its first part
        bodies.end()
        refused = await asyncio.gather(*waiting, return_exceptions=True)
        later = bodies.read(receiver(part(b"a", True)), {})
        refused += await asyncio.gather(later, return_exceptions=True)
        return refused, await bodies.read(receiver(part(b"ab", True), part(b"c")), {})

    refused, whole = asyncio.run(end_meanwhile())
    assert [(error.status, error.code) for error in refused] == [(503, "server_draining")] * 4
    assert whole == b"abc"


def visit(
    app, *, rules=OPEN, path="/v1/models", headers=(), messages=({"type": "http.request", "body": b""},)
):
    """Send one request through a gate; return the status sent and what was counted."""
    sent, done = [], []

    async def send(message):
        sent.append(message)

    gate = RequestMiddleware(
        app, rules=rules, bodies=Bodies(ServerLimits()), on_done=lambda *what: done.append(what)
    )
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "headers": list(headers),
        "client": ("10.0.0.9", 1),
    }
    asyncio.run(gate(scope, receiver(*messages), send))
    status = next((message["status"] for message in sent if message["type"] == "http.response.start"), None)
    return status, done


async def fine(scope, _receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["state"]["visit"].client.encode()})


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/models", 401), ("/metrics", 401), ("/health", 200), ("/", 200)]
)
def test_what_needs_a_key(path, status):
    assert visit(fine, rules=AccessPolicy(keys=KEYS), path=path)[0] == status


def test_a_key_opens():
    headers = [(b"authorization", b"Bearer a-key-of-some-length")]
    assert visit(fine, rules=AccessPolicy(keys=KEYS), headers=headers)[0] == 200


def test_a_fault_before_an_answer_is_500_and_counted(caplog):
    async def broken(*_):
        raise RuntimeError("secret detail")

    status, [(_, counted, _)] = visit(broken)
    assert (status, counted) == (500, 500)
    assert "A request failed by a defect: RuntimeError" in caplog.text


@pytest.mark.parametrize(("given", "is_kept"), [(b"gw-1:7/x", True), (b"a b", False), (b"x" * 200, False)])
def test_the_id_of_a_gateway_comes_back_and_is_logged(given, is_kept, caplog):
    caplog.set_level("DEBUG", "penstock")
    visit(fine, headers=[(b"x-request-id", given)])
    assert (f"Request {given.decode()} " in caplog.text) == is_kept
    assert "ended with 200" in caplog.text


def test_answers_end_when_the_client_leaves_and_when_the_request_is_over():
    ended = []
    answers = SimpleNamespace(cancel=lambda: ended.append("cancelled"))

    async def waiting(scope, receive, _send):
        scope["state"]["visit"].opened(answers)
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        ended.append("told")

    visit(waiting, messages=(part(b""), LEFT))
    assert ended == ["cancelled", "told", "cancelled"]


def test_answers_opened_after_the_client_left_end_at_once():
    ended = []

    async def late(scope, receive, _send):
        await receive()
        await receive()
        scope["state"]["visit"].opened(SimpleNamespace(cancel=lambda: ended.append("cancelled")))
        assert ended == ["cancelled"]

    visit(late, messages=(part(b""), LEFT))
    assert ended


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_the_ending_server_cancels_ends_quietly(caplog, begun):
    sent, counts = [], []

    async def stuck(_scope, _receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def cancel_it():
        gate = RequestMiddleware(
            stuck,
            rules=OPEN,
            bodies=Bodies(ServerLimits()),
            on_done=lambda _route, status, _seconds: counts.append(status),
        )
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/models",
            "headers": [],
            "client": ("10.0.0.9", 1),
        }
        going = asyncio.create_task(gate(scope, receiver(part(b"")), send))
        for _ in range(10):
            await asyncio.sleep(0)
        going.cancel()
        await going

    asyncio.run(cancel_it())
    assert sent[0]["status"] == (200 if begun else 503)
    assert counts == [503]
    assert " was cut" in caplog.text


def start_of(status=200):
    return {"type": "http.response.start", "status": status, "headers": []}


def sent_part(*, more):
    return {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": more}


def leaves_first(*messages):
    """An application that answers after its client has left."""

    async def app(_scope, receive, send):
        for message in messages[:-1]:
            await send(message)
        while (await receive())["type"] != "http.disconnect":
            continue
        await send(messages[-1])

    return app


@pytest.mark.parametrize(
    "app",
    [
        leaves_first(start_of(503), sent_part(more=False)),
        leaves_first(start_of(), sent_part(more=True), sent_part(more=False)),
        leaves_first(start_of(), sent_part(more=True)),
    ],
    ids=["before an answer", "within a stream", "within a stream that ends"],
)
def test_a_client_that_leaves_is_counted_as_499(app):
    assert counted(app, part(b""), LEFT) == [499]


def test_a_client_that_leaves_before_its_body_arrived_is_counted_as_499():
    assert counted(fine, LEFT) == [499]


@pytest.mark.parametrize("finish", [500, 503, 504])
def test_a_stream_that_an_error_cuts_is_counted_by_the_error(finish):
    async def chunks():
        yield Health(status="ok")
        raise ApiError("Cut.", status=finish)

    async def app(scope, receive, send):
        await EventStream(chunks())(scope, receive, send)

    assert counted(app, part(b"")) == [finish]


def test_a_stream_that_ends_is_counted_as_200():
    async def chunks():
        yield Health(status="ok")

    async def app(scope, receive, send):
        await EventStream(chunks())(scope, receive, send)

    assert counted(app, part(b"")) == [200]


def counted(app, *messages):
    statuses = []

    async def send(_message):
        await asyncio.sleep(0)

    gate = RequestMiddleware(
        app,
        rules=OPEN,
        bodies=Bodies(ServerLimits()),
        on_done=lambda _route, status, _seconds: statuses.append(status),
    )
    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [], "client": ("10.0.0.9", 1)}
    asyncio.run(gate(scope, receiver(*messages), send))
    return statuses
