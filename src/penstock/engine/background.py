"""Background thread of an engine: requests from any thread, output deltas by callback.

Only this thread touches the engine's state. Other threads append commands (submit, cancel) to a list, which
the thread runs before its next step. So no caller waits for a step to end, and only the list needs a lock.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Self, TypeVar

from penstock.core.errors import EngineClosed, PenstockError, RunnerLost, UsageError
from penstock.core.log import EventLog
from penstock.engine.engine import Engine
from penstock.engine.request import Finish, OnDelta, OutputDelta, Request
from penstock.engine.stats import Stats

log = EventLog(__name__)

T = TypeVar("T")


class EngineThread:
    """Thread that steps an engine while it has work.

    Args:
        engine: used by this thread only from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: str | None = None
        """Reason why requests are refused since the engine failed; None: it has not failed."""
        self._changed = threading.Condition()
        self._asked: list[Callable[[], None]] = []
        self._listeners: dict[int, tuple[OnDelta, int]] = {}  # request id -> (callback, answers not finished)
        self._ids = count()
        self._refusing: str | None = None  # the reason
        self._ending = False
        self._ended = False
        self._idle = True
        self._thread = threading.Thread(target=self._run, name="penstock-engine", daemon=True)

    def start(self) -> Self:
        """Start the thread."""
        self.engine.runner.on_lost(self._lost)
        self._thread.start()
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, request: Request) -> None:
        """Raise what `Engine.check` raises for a request; `submit` calls it too."""
        self.engine.check(request)

    def submit(self, request: Request, on_delta: OnDelta) -> int:
        """Queue a request and return its id.

        Args:
            on_delta: called with every delta; the last one of each answer has `finish` set.

        Raises:
            UsageError: the request can never be computed (see `Engine.check`).
            EngineClosed: the engine drains, is closed, has failed, or belongs to another process.
        """
        self._check_process()
        self.engine.check(request)
        with self._changed:
            self._check_open()
            request_id = next(self._ids)
            self._ask(lambda: self._add(request, request_id, on_delta))
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancel a request; its last deltas are still delivered. Unknown and finished ids are ignored."""
        with self._changed:
            self._ask(lambda: self.engine.cancel(request_id))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new requests, then wait until all have finished; return False at the timeout."""
        with self._changed:
            self._refuse("The engine accepts no more requests")
            return self._changed.wait_for(lambda: self._idle and not self._asked, timeout_s)

    def close(self) -> None:
        """Cancel all requests, stop the thread and close the engine. Idempotent."""
        with self._changed:
            self._refuse("The engine is closed")
            self._ending = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # from a listener
            self._thread.join()

    def call(self, what: Callable[[Engine], T]) -> T:
        """Run `what(engine)` between two steps, for instance to add an adapter; return its result.

        Raises:
            EngineClosed: the engine drains, is closed or has failed. Exceptions of `what` are passed on.
        """
        self._check_process()
        done: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._ask(lambda: _do(what, self.engine, done))
        return done.result()

    def stats(self) -> Stats:
        """Return a snapshot of the engine's statistics. Thread-safe."""
        return self.engine.stats()

    def _check_process(self) -> None:
        """Raise in a forked process: threads do not survive a fork. Called before any lock is taken."""
        if self._thread.ident is not None and not self._ended and not self._thread.is_alive():
            raise EngineClosed(
                "The engine runs in the process that opened it, from which this one was forked",
                got=f"process {os.getpid()}",
                fix="Open the model in this process, or use threads instead of processes.",
            )

    def _check_open(self) -> None:
        if self._refusing is not None:
            raise EngineClosed(self._refusing, fix="Open the model again, or use another server.")

    def _lost(self) -> None:
        with self._changed:
            self._ask(self.engine.runner.check)  # which raises, in the engine's thread

    def _ask(self, what: Callable[[], None]) -> None:
        if self._ended:  # nothing would run the command
            return
        self._asked.append(what)
        self._idle = False
        self._changed.notify_all()

    def _refuse(self, why: str) -> None:
        if self._refusing is None:
            self._refusing = why

    def _run(self) -> None:
        finish: Finish = "cancelled"
        try:
            while self._take_up():
                self._tell(self.engine.step())
        except BaseException as error:  # a Rust panic is not an Exception, and nothing else would report it
            if not isinstance(error, RunnerLost):
                log.exception("engine_failed", "The engine has a defect")
            finish, self.failure = "error", str(error) or repr(error)
        self._end(finish)

    def _take_up(self) -> bool:
        """Run the queued commands, or wait for one; return False to stop."""
        with self._changed:
            while not (self._asked or self._ending or self.engine.has_work):
                self._idle = True
                self._changed.notify_all()
                self._changed.wait()
            self._idle = False
            num_asked = len(self._asked)
        for _ in range(num_asked):  # one at a time: if one raises, `_end` handles the others
            self._asked.pop(0)()
        return not self._ending

    def _add(self, request: Request, request_id: int, on_delta: OnDelta) -> None:
        self._listeners[request_id] = (on_delta, request.num_answers)
        try:
            self.engine.add(request, request_id=request_id)
        except PenstockError as error:  # `check` passed, but an adapter was removed since
            for answer in range(request.num_answers):
                finish: Finish = "refused" if isinstance(error, UsageError) else "error"
                self._tell(
                    [OutputDelta(request_id=request_id, answer=answer, finish=finish, error=str(error))]
                )

    def _tell(self, deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            on_delta, num_open = self._listeners[delta.request_id]
            if delta.finish is not None:
                if num_open == 1:
                    del self._listeners[delta.request_id]
                else:
                    self._listeners[delta.request_id] = (on_delta, num_open - 1)
            try:
                on_delta(delta)
            except Exception:  # the listener's defect ends its own answers only
                log.exception(
                    "listener_failed",
                    "The listener of request {request} failed",
                    request=delta.request_id,
                )
                self.engine.cancel(delta.request_id)

    def _end(self, finish: Finish) -> None:
        """Refuse new requests, finish open ones and notify all listeners."""
        with self._changed:
            self._refuse(self.failure or "The engine is closed")
            self._ended = True
            asked, self._asked = self._asked, []
        try:
            for what in asked:
                with suppress(RunnerLost):  # already being reported
                    what()
            self._tell(self.engine.close(finish, error=self.failure))
        except Exception:  # a bug; this thread is the last that can report it
            log.exception("close_failed", "The engine could not be closed")
        for request_id, (_, num_open) in list(self._listeners.items()):
            self._tell([OutputDelta(request_id=request_id, finish=finish, error=self.failure)] * num_open)
        with self._changed:
            self._idle = True
            self._changed.notify_all()


def _do(what: Callable[[Engine], T], engine: Engine, done: "Future[T]") -> None:
    try:
        done.set_result(what(engine))
    except BaseException as error:  # whatever it is, the thread that waits raises it; a Rust panic too
        done.set_exception(error)
        if isinstance(error, RunnerLost) or not isinstance(error, Exception):
            raise
