"""Events of a stream, and what is sent while there are none."""

import asyncio

from penstock.serve.routes.info import Health
from penstock.serve.sse import EventStream


def sent(chunks, *, quiet_s, when_sent):
    """Return the bodies that a stream of chunks sends, in their order."""
    bodies = []

    async def send(message):
        if body := message.get("body"):
            bodies.append(body.decode())
            when_sent(body.decode())

    asyncio.run(EventStream(chunks, quiet_s=quiet_s).stream_response(send))
    return bodies


def test_a_stream_that_waits_sends_comments_and_then_its_events():
    turn, comments = asyncio.Event(), []

    async def chunks():
        await turn.wait()
        yield Health(status="ok")

    def when_sent(body):
        comments.append(body)
        if len(comments) == 3:
            turn.set()

    bodies = sent(chunks(), quiet_s=0.001, when_sent=when_sent)
    assert bodies[:3] == [": still here\n\n"] * 3
    assert [body for body in bodies if not body.startswith(":")] == [
        'data: {"status":"ok","reason":null}\n\n',
        "data: [DONE]\n\n",
    ]


def test_a_reader_that_does_not_read_is_sent_no_comments():
    messages, let_go = [], asyncio.Event()

    async def chunks():
        yield Health(status="ok")

    async def send(message):
        messages.append(message.get("body", b""))
        if messages[-1].startswith(b"data"):
            await let_go.wait()  # its buffers are full

    async def both():
        stream = asyncio.create_task(EventStream(chunks(), quiet_s=0.0).stream_response(send))
        for _ in range(100):
            await asyncio.sleep(0)
        let_go.set()
        await stream

    asyncio.run(both())
    events = [body for body in messages if body.startswith(b"data")]
    assert len(events) == 2
    assert messages.index(events[1]) == messages.index(events[0]) + 1
