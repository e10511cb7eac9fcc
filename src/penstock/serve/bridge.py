"""From the engine's thread to the event loop: answers as asynchronous iterators.

The engine calls `on_piece` for every piece, up to some thousands a second. Waking the loop for each would
cost more than the pieces do, so they are put into one deque and the loop is woken once for all that are in
it by then: about once a step. Handing out happens in the loop, so nothing here needs a lock.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Protocol

from penstock.core import clock
from penstock.core.errors import EngineClosed, PenstockError
from penstock.engine.background import OnPiece
from penstock.engine.request import Piece, Request
from penstock.engine.stats import Stats
from penstock.serve.errors import ApiError
from penstock.serve.limits import Admission
from penstock.serve.metrics import Metrics


class Runs(Protocol):
    """What is asked of an engine; `EngineThread` is one."""

    failure: str | None

    def check(self, request: Request) -> None:
        """Refuse what could never be answered."""

    def submit(self, request: Request, on_piece: OnPiece) -> int:
        """Queue a request; return its id."""

    def cancel(self, request_id: int) -> None:
        """End a request soon."""

    def stats(self) -> Stats:
        """Return the moment's numbers."""


class Answers:
    """The pieces of some requests as they come, to be iterated over once: (index of the answer, piece).

    The answers of the first request come first, then those of the second. Ends after the last piece of all
    of them, or when cancelled.
    """

    def __init__(self, bridge: "Bridge", requests: Sequence[Request], *, began_s: float) -> None:
        self.requests = tuple(requests)
        self.num_answers = sum(request.num_answers for request in requests)
        self.first_index: dict[int, int] = {}
        """By id of the request: the index of its first answer."""
        self._bridge = bridge
        self._pieces: asyncio.Queue[tuple[int, Piece] | None] = asyncio.Queue()
        self._num_open = self.num_answers
        self._began_s = began_s
        self._latest_s: dict[int, float] = {}  # by answer: when its latest tokens came

    def __aiter__(self) -> AsyncIterator[tuple[int, Piece]]:
        return self._iterate()

    def cancel(self) -> None:
        """End what has not ended: its blocks are free after the engine's next step."""
        if self._num_open:
            self._num_open = 0
            self._bridge.forget(self, cancel=True)
            self._pieces.put_nowait(None)

    def take(self, piece: Piece, *, now_s: float) -> None:
        """Hear of a piece; in the loop's thread."""
        index = self.first_index[piece.request_id] + piece.answer
        if piece.token_ids:
            self._measure(index, len(piece.token_ids), now_s)
        self._pieces.put_nowait((index, piece))
        if piece.finish is not None:
            self._num_open -= 1
            if not self._num_open:
                self._bridge.forget(self, cancel=False)
                self._pieces.put_nowait(None)

    async def _iterate(self) -> AsyncIterator[tuple[int, Piece]]:
        while (found := await self._pieces.get()) is not None:
            yield found

    def _measure(self, index: int, num_tokens: int, now_s: float) -> None:
        before = self._latest_s.get(index)
        self._latest_s[index] = now_s
        if before is None:
            self._bridge.metrics.first_token(now_s - self._began_s)
        else:
            self._bridge.metrics.next_tokens(now_s - before, num_tokens)


class Bridge:
    """Submits to an engine and hands out what comes back.

    Args:
        engine: started already; not closed here.
    """

    def __init__(self, engine: Runs, *, admission: Admission, metrics: Metrics) -> None:
        self.engine = engine
        self.metrics = metrics
        self._admission = admission
        self._open: dict[int, Answers] = {}  # by id of the request
        self._all: set[Answers] = set()
        self._arrived: deque[Piece] = deque()
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, requests: Sequence[Request]) -> Answers:
        """Queue requests, all or none of them; in the loop's thread.

        Raises:
            ApiError: there is no room for them now (429), or the engine takes none (503).
            UsageError: one could never be answered.
        """
        self._loop = asyncio.get_running_loop()
        now_s = clock.monotonic()
        answers = Answers(self, requests, began_s=now_s)
        self._admission.enter(answers.num_answers, now_s=now_s)
        self._all.add(answers)
        self._idle.clear()
        index = 0
        try:
            for request in requests:
                request_id = self.engine.submit(request, self._on_piece)
                answers.first_index[request_id] = index
                self._open[request_id] = answers
                index += request.num_answers
        except EngineClosed as error:
            answers.cancel()
            raise ApiError(503, str(error), code="engine_closed", retry_after_s=5) from None
        except PenstockError:
            answers.cancel()
            raise
        return answers

    def forget(self, answers: Answers, *, cancel: bool) -> None:
        """Hear no more of some requests."""
        self._all.discard(answers)
        for request_id in answers.first_index:
            del self._open[request_id]
            if cancel:
                self.engine.cancel(request_id)
        self._admission.leave(answers.num_answers, now_s=clock.monotonic())
        if not self._all:
            self._idle.set()

    @property
    def num_open(self) -> int:
        """Answers in the making or waiting."""
        return self._admission.num_open

    async def wait_idle(self) -> None:
        """Return when no request is open."""
        await self._idle.wait()

    def cancel_all(self) -> None:
        """End every request; who iterates over one gets its end."""
        for answers in list(self._all):
            answers.cancel()

    def _on_piece(self, piece: Piece) -> None:
        """Hear of a piece in the engine's thread."""
        self._arrived.append(piece)
        if not self._is_woken:
            self._is_woken = True
            assert self._loop is not None, "submit has set it"
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._is_woken = False  # before the deque is emptied: what comes from now on wakes the loop again
        now_s = clock.monotonic()
        while self._arrived:
            piece = self._arrived.popleft()
            if answers := self._open.get(piece.request_id):
                answers.take(piece, now_s=now_s)
