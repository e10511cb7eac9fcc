"""An engine in its thread: many submitters, listeners that fail, draining, closing, a runner that dies."""

import asyncio
import queue
import threading

import pytest

from penstock.core.errors import EngineClosed, RunnerLost, UsageError
from penstock.engine.background import EngineThread
from penstock.engine.request import Request
from tests.hashing_engine import hashing_engine, tokens_of
from tests.hashing_model import answer_of

PATIENCE_S = 60.0


def request(*prompt, max_tokens=6, **more):
    return Request(prompt=prompt, max_tokens=max_tokens, **more)


class Heard:
    """Keeps the pieces of a request and says when they are all there."""

    def __init__(self, thread, asked):
        self.pieces, self.asked, self.ended = [], asked, threading.Event()
        self.id = thread.submit(asked, self.take)

    def take(self, piece):
        self.pieces.append(piece)
        if len([p for p in self.pieces if p.finish]) == self.asked.num_answers:
            self.ended.set()

    def finishes(self):
        assert self.ended.wait(PATIENCE_S)
        return [piece.finish for piece in self.pieces if piece.finish]


class Gate:
    """Lets steps through once it is open."""

    def __init__(self):
        self.open, self.reached = threading.Event(), threading.Event()

    def __call__(self, _):
        self.reached.set()
        assert self.open.wait(PATIENCE_S)


def test_a_hundred_threads_submit_at_once_and_each_hears_its_own_answer():
    heard = queue.SimpleQueue()
    with EngineThread(hashing_engine()) as engine:

        def ask(n):
            heard.put(Heard(engine, request(n, n + 1, max_tokens=1 + n % 9)))

        callers = [threading.Thread(target=ask, args=(n,)) for n in range(100)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        for one in [heard.get() for _ in callers]:
            assert one.finishes() == ["length"]
            assert tokens_of(one.pieces, one.id) == answer_of(one.asked)
        assert engine.drain(PATIENCE_S)
        assert engine.stats().used_blocks == 0


def test_a_hundred_tasks_hear_their_answers_while_some_leave():
    async def ask(engine, n):
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        asked = request(n, n + 1, max_tokens=20)
        request_id = engine.submit(asked, lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece))
        tokens = []
        while True:
            piece = await pieces.get()
            tokens += piece.token_ids
            if n % 3 == 0 and len(tokens) == 1:
                engine.cancel(request_id)
            if piece.finish is not None:
                return asked, tokens, piece.finish

    async def everyone(engine):
        return await asyncio.gather(*(ask(engine, n) for n in range(100)))

    with EngineThread(hashing_engine()) as engine:
        for asked, tokens, finish in asyncio.run(everyone(engine)):
            assert tokens == answer_of(asked)[: len(tokens)]
            assert finish == ("length" if len(tokens) == 20 else "cancelled")
        assert engine.drain(PATIENCE_S)
        assert engine.stats().used_blocks == 0


def test_cancelling_ends_a_request_that_waits_and_one_that_runs():
    gate = Gate()
    with EngineThread(hashing_engine(before=gate)) as engine:
        heard = [Heard(engine, request(n, max_tokens=100)) for n in range(10)]  # eight run at once
        assert gate.reached.wait(PATIENCE_S)
        for one in heard:
            engine.cancel(one.id)
        gate.open.set()
        assert [one.finishes() for one in heard] == [["cancelled"]] * 10


def test_draining_refuses_what_comes_and_waits_for_what_is_there():
    gate = Gate()
    with EngineThread(hashing_engine(before=gate)) as engine:
        one = Heard(engine, request(5))
        assert not engine.drain(timeout_s=0.0)
        with pytest.raises(EngineClosed, match="accepts no more requests"):
            engine.submit(request(6), lambda _: None)
        gate.open.set()
        assert engine.drain(PATIENCE_S)
        assert one.finishes() == ["length"]


def test_closing_cancels_what_runs_and_may_be_done_twice():
    engine = EngineThread(hashing_engine(num_blocks=200_000)).start()
    heard = [Heard(engine, request(n, max_tokens=100_000, num_answers=2)) for n in range(3)]  # minutes
    engine.close()
    engine.close()
    assert [one.finishes() for one in heard] == [["cancelled"] * 2] * 3
    assert engine.engine.runner.closed
    with pytest.raises(EngineClosed):
        engine.submit(request(6), lambda _: None)


def test_a_listener_may_close_the_engine():
    engine = EngineThread(hashing_engine()).start()
    finishes = queue.SimpleQueue()

    def close(piece):
        engine.close()
        if piece.finish:
            finishes.put(piece.finish)

    engine.submit(request(1, max_tokens=100), close)
    assert finishes.get(timeout=PATIENCE_S) == "cancelled"
    assert engine.drain(PATIENCE_S)


def test_a_listener_that_fails_loses_its_request_only(caplog):
    def broken(_):
        raise ValueError("of a listener")

    with EngineThread(hashing_engine()) as engine:
        engine.submit(request(1, max_tokens=100), broken)
        one = Heard(engine, request(2))
        assert one.finishes() == ["length"]
        assert engine.drain(PATIENCE_S)
        assert engine.stats().used_blocks == 0
    assert "The listener of request" in caplog.text


def test_a_request_that_never_fits_is_refused_to_its_submitter():
    with EngineThread(hashing_engine(num_blocks=4)) as engine, pytest.raises(UsageError, match="positions"):
        engine.submit(request(*range(10), max_tokens=7), lambda _: None)


def test_a_call_that_ends_the_engine_is_heard_by_its_caller():
    class Panic(BaseException):
        """As of Rust code, which is no Exception."""

    def panic(_):
        raise Panic("defect")

    engine, heard = EngineThread(hashing_engine()).start(), queue.SimpleQueue()

    def call():
        try:
            engine.call(panic)
        except Panic as error:
            heard.put(error)

    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    assert str(heard.get(timeout=PATIENCE_S)) == "defect"
    caller.join()
    engine.close()
    assert engine.failure == "defect"


def test_a_lost_runner_ends_all_answers_and_says_why():
    gate = Gate()

    def before(batch):
        gate(batch)
        raise RunnerLost("Rank 1 has ended")

    with EngineThread(hashing_engine(before=before)) as engine:
        heard = [Heard(engine, request(n, num_answers=2)) for n in range(20)]
        gate.open.set()
        for one in heard:
            assert one.finishes() == ["error", "error"]
            assert one.pieces[-1].error == "Rank 1 has ended."
        assert engine.drain(PATIENCE_S)
        with pytest.raises(EngineClosed, match="Rank 1 has ended"):
            engine.submit(request(1), lambda _: None)
        assert engine.failure == "Rank 1 has ended."
        engine.cancel(heard[0].id)  # a client that leaves late
        assert engine.drain(PATIENCE_S)
