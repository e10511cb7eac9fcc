"""From the engine's thread to the event loop."""

import asyncio
import threading

import pytest

from penstock.core.errors import EngineClosed, UsageError
from penstock.engine.request import OutputDelta, Request
from penstock.serve.admission import Admission
from penstock.serve.errors import ApiError
from penstock.serve.metrics import Metrics
from penstock.serve.output_stream import Bridge, UsageCounter


class Engine:
    """Remembers what it is asked; the test says what comes back."""

    def __init__(self):
        self.failure, self.listeners, self.cancelled, self.refuses = None, [], [], None

    def check(self, _request):
        raise AssertionError("routes check, in a thread")

    def submit(self, _request, on_delta):
        if self.refuses is not None and len(self.listeners) == self.refuses[0]:
            raise self.refuses[1]
        self.listeners.append(on_delta)
        return len(self.listeners) - 1

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    def stats(self):
        raise AssertionError("nobody scrapes")

    def say(self, *pieces):
        """Speak from another thread, as the real one does."""
        speaker = threading.Thread(target=lambda: [self.listeners[p.request_id](p) for p in pieces])
        speaker.start()
        speaker.join()


def made(max_open=8):
    engine = Engine()
    admission = Admission(max_open)
    return engine, admission, Bridge(engine, admission=admission, metrics=Metrics(engine.stats))


def asked(num_answers=1):
    return Request(prompt=(1, 2), max_tokens=4, num_answers=num_answers)


def test_pieces_of_several_requests_come_by_index_and_in_order():
    async def scene():
        engine, admission, bridge = made()
        tally = UsageCounter(bridge.submit([asked(2), asked()]))
        engine.say(
            OutputDelta(request_id=0, answer=1, text="b", token_ids=(5,)),
            OutputDelta(request_id=1, text="c", token_ids=(6,), finish="stop", num_cached=2),
            OutputDelta(request_id=0, answer=0, text="a", token_ids=(7, 8), finish="length", num_cached=1),
            OutputDelta(request_id=0, answer=1, finish="stop", num_cached=2),
        )
        heard = [(index, piece.text) async for index, piece in tally]
        usage = tally.usage()
        assert admission.num_open == 0
        await asyncio.wait_for(bridge.wait_idle(), 60)
        return heard, (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.prompt_tokens_details.cached_tokens,
        )

    heard, usage = asyncio.run(scene())
    assert heard == [(1, "b"), (2, "c"), (0, "a"), (1, "")]
    assert usage == (4, 4, 3)


def test_what_is_cancelled_is_free_at_once_and_heard_no_more():
    async def scene():
        engine, admission, bridge = made()
        answers = bridge.submit([asked(), asked()])
        answers.cancel()
        answers.cancel()
        engine.say(
            OutputDelta(request_id=0, finish="cancelled"), OutputDelta(request_id=1, finish="cancelled")
        )
        assert (engine.cancelled, admission.num_open) == ([0, 1], 0)
        return [piece async for piece in answers]

    assert asyncio.run(scene()) == []


@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("deadline", 504), ("cancelled", 503)])
def test_an_answer_that_ends_badly_is_an_error_and_ends_the_others(finish, status):
    async def scene():
        engine, admission, bridge = made()
        tally = UsageCounter(bridge.submit([asked(2)]))
        engine.say(OutputDelta(request_id=0, answer=1, finish=finish))
        with pytest.raises(ApiError) as failed:
            [piece async for piece in tally]
        assert (engine.cancelled, admission.num_open) == ([0], 0)
        return failed.value.status

    assert asyncio.run(scene()) == status


def test_the_end_of_the_server_is_an_error_for_who_still_waits():
    async def scene():
        _, _, bridge = made()
        tally = UsageCounter(bridge.submit([asked()]))
        bridge.cancel_all()
        with pytest.raises(ApiError, match="server is shutting down"):
            [piece async for piece in tally]

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("error", "raised"), [(EngineClosed("It is closed"), ApiError), (UsageError("Never"), UsageError)]
)
def test_requests_are_queued_all_or_none(error, raised):
    async def scene():
        engine, admission, bridge = made()
        engine.refuses = (1, error)
        with pytest.raises(raised):
            bridge.submit([asked(), asked()])
        return engine.cancelled, admission.num_open

    assert asyncio.run(scene()) == ([0], 0)


def test_no_more_than_may_be_open():
    async def scene():
        _, admission, bridge = made(max_open=2)
        bridge.submit([asked(2)])
        with pytest.raises(ApiError) as refused:
            bridge.submit([asked()])
        assert admission.num_open == 2
        return refused.value.status

    assert asyncio.run(scene()) == 429
