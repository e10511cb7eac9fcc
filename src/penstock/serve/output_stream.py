"""Output streams: engine deltas from its thread to the event loop, with token counts.

The engine calls `on_delta` for every delta, up to some thousands per second. Waking the event loop for each
would cost more than the deltas themselves, so they are queued in a deque and the loop is woken once for all
of them, about once a step. Distribution happens in the loop, so nothing here needs a lock.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from typing import Protocol

from penstock.core import clock
from penstock.core.errors import EngineClosed, PenstockError
from penstock.engine.request import OnDelta, OutputDelta, Request
from penstock.engine.stats import Stats
from penstock.serve.admission import Admission
from penstock.serve.errors import ApiError
from penstock.serve.metrics import Metrics
from penstock.serve.schema.base import PromptTokensDetails, Usage


def stop_reason(delta: OutputDelta, stop_ids: Collection[int]) -> int | str | None:
    """Return the stop text that ended an answer, or its stop token.

    Args:
        stop_ids: stop tokens that the request names; the model's own are no reason.
    """
    reason = delta.stop_reason
    return reason if isinstance(reason, str) or reason in stop_ids else None


class EngineClient(Protocol):
    """The part of `EngineThread` that the server uses."""

    failure: str | None

    def check(self, request: Request) -> None:
        """Raise for a request that can never be computed."""

    def submit(self, request: Request, on_delta: OnDelta) -> int:
        """Queue a request and return its id."""

    def cancel(self, request_id: int) -> None:
        """Cancel a request."""

    def stats(self) -> Stats:
        """Return a snapshot of the statistics."""


class OutputStream:
    """Deltas of one or several requests, for one iteration: (index of the answer, delta).

    Indices count the answers of the first request, then those of the second, and so on. The iteration ends
    after the last delta of all answers, or when cancelled.
    """

    def __init__(self, bridge: "Bridge", requests: Sequence[Request], *, began_s: float) -> None:
        self.requests = tuple(requests)
        self.num_answers = sum(request.num_answers for request in requests)
        self.first_index: dict[int, int] = {}
        """Request id -> index of its first answer."""
        self._bridge = bridge
        self._deltas: asyncio.Queue[tuple[int, OutputDelta] | None] = asyncio.Queue()
        self._num_open = self.num_answers
        self._began_s = began_s
        self._latest_s: dict[int, float] = {}  # answer index -> time of its latest tokens

    def __aiter__(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        return self._iterate()

    def cancel(self) -> None:
        """Cancel unfinished answers; their KV blocks are free after the engine's next step."""
        if self._num_open:
            self._num_open = 0
            self._bridge.forget(self, cancel=True)
            self._deltas.put_nowait(None)

    def take(self, delta: OutputDelta, *, now_s: float) -> None:
        """Add a delta; called in the event loop's thread."""
        index = self.first_index[delta.request_id] + delta.answer
        if delta.token_ids:
            self._measure(index, len(delta.token_ids), now_s)
        self._deltas.put_nowait((index, delta))
        if delta.finish is not None:
            self._num_open -= 1
            if not self._num_open:
                self._bridge.forget(self, cancel=False)
                self._deltas.put_nowait(None)

    async def _iterate(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        while (found := await self._deltas.get()) is not None:
            yield found

    def _measure(self, index: int, num_tokens: int, now_s: float) -> None:
        before = self._latest_s.get(index)
        self._latest_s[index] = now_s
        if before is None:
            self._bridge.metrics.first_token(now_s - self._began_s)
        else:
            self._bridge.metrics.next_tokens(now_s - before, num_tokens)


class Bridge:
    """Submits requests to the engine and distributes its deltas.

    Args:
        engine: already started; not closed here.
    """

    def __init__(self, engine: EngineClient, *, admission: Admission, metrics: Metrics) -> None:
        self.engine = engine
        self.metrics = metrics
        self._admission = admission
        self._open: dict[int, OutputStream] = {}  # by request id
        self._all: set[OutputStream] = set()
        self._arrived: deque[OutputDelta] = deque()
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue all of these requests or none; call in the event loop's thread.

        Raises:
            ApiError: 429 if there are too many open answers, 503 if the engine is closed.
            UsageError: a request can never be computed.
        """
        self._loop = asyncio.get_running_loop()
        now_s = clock.monotonic()
        answers = OutputStream(self, requests, began_s=now_s)
        self._admission.enter(answers.num_answers, now_s=now_s)
        self._all.add(answers)
        self._idle.clear()
        index = 0
        try:
            for request in requests:
                request_id = self.engine.submit(request, self._on_delta)
                answers.first_index[request_id] = index
                self._open[request_id] = answers
                index += request.num_answers
        except EngineClosed as error:
            answers.cancel()
            raise ApiError(str(error), status=503, code="engine_closed", retry_after_s=5) from None
        except PenstockError:
            answers.cancel()
            raise
        return answers

    def forget(self, answers: OutputStream, *, cancel: bool) -> None:
        """Drop some requests: their deltas are no longer distributed."""
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
        """Answers running or waiting."""
        return self._admission.num_open

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def cancel_all(self) -> None:
        """Cancel every request; its iterator ends."""
        for answers in list(self._all):
            answers.cancel()

    def _on_delta(self, delta: OutputDelta) -> None:
        """Queue a delta; called in the engine's thread."""
        self._arrived.append(delta)
        if not self._is_woken:
            self._is_woken = True
            assert self._loop is not None, "submit has set it"
            with suppress(RuntimeError):  # the event loop is closed
                self._loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        self._is_woken = False  # before emptying the deque: later deltas wake the loop again
        now_s = clock.monotonic()
        while self._arrived:
            delta = self._arrived.popleft()
            if answers := self._open.get(delta.request_id):
                answers.take(delta, now_s=now_s)


_FAULTS = {
    "refused": (400, "No token could follow the answer's constraints.", "cannot_be_followed"),
    "error": (500, "The engine failed on this answer. The server's log has the details.", "engine_error"),
    "deadline": (504, "The answer was not finished within the server's time limit.", "deadline"),
    "cancelled": (503, "The answer was cancelled because the server is shutting down.", "cancelled"),
}


class UsageCounter:
    """Iterates over answers and counts their tokens.

    Args:
        answers: the stream; iterated over here only.
    """

    def __init__(self, answers: OutputStream) -> None:
        self._answers = answers
        self._num_drawn = 0
        self._num_cached = 0

    async def __aiter__(self) -> AsyncIterator[tuple[int, OutputDelta]]:
        """Yield (index of the answer, delta) until all answers have finished.

        Raises:
            ApiError: an answer failed; the others are cancelled.
        """
        num_open = self._answers.num_answers
        async for index, delta in self._answers:
            if delta.finish in _FAULTS:
                self._answers.cancel()
                raise _fault(delta.finish, delta.error)
            self._num_drawn += len(delta.token_ids)
            if delta.finish is not None:
                num_open -= 1
                self._num_cached += delta.num_cached if delta.answer == 0 else 0
            yield index, delta
        if num_open:
            raise _fault("cancelled")

    def usage(self) -> Usage:
        """Return the token counts so far."""
        num_prompt = sum(len(request.prompt) for request in self._answers.requests)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_drawn,
            total_tokens=num_prompt + self._num_drawn,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._num_cached),
        )


def _fault(finish: str, reason: str | None = None) -> ApiError:
    status, message, code = _FAULTS[finish]
    return ApiError(reason or message, status=status, code=code)
