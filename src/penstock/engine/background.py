"""An engine in a thread of its own: others submit requests and hear of each piece at once.

All of the engine's state is touched by that one thread. What others ask (submit, cancel) is put into a list
that the thread takes up before its next step, so nobody waits for a step to end and nothing needs a lock but
the list.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from typing import Self, TypeVar

from penstock.core.errors import EngineClosed, PenstockError, RunnerLost, UsageError
from penstock.engine.engine import Engine
from penstock.engine.request import Finish, Piece, Request
from penstock.engine.stats import Stats

log = logging.getLogger(__name__)

T = TypeVar("T")
OnPiece = Callable[[Piece], None]
"""Called from the engine's thread; it must not wait."""


class EngineThread:
    """Steps an engine for as long as it has work.

    Args:
        engine: from now on touched by the thread only.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: str | None = None
        """Why no request is taken any more; None while the engine is well."""
        self._changed = threading.Condition()
        self._asked: list[Callable[[], None]] = []
        self._listeners: dict[int, tuple[OnPiece, int]] = {}  # and answers that have not ended
        self._ids = count()
        self._refusing: str | None = None  # why
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
        """Refuse a request that could never be answered, as `Engine.check` does; `submit` does so too."""
        self.engine.check(request)

    def submit(self, request: Request, on_piece: OnPiece) -> int:
        """Queue a request; return its id.

        Args:
            on_piece: hears of every piece, for each answer up to one with `finish`.

        Raises:
            UsageError: it could never be answered.
            EngineClosed: the engine drains, is closed or has failed, or is another process's.
        """
        self._check_process()
        self.engine.check(request)
        with self._changed:
            self._check_open()
            request_id = next(self._ids)
            self._ask(lambda: self._add(request, request_id, on_piece))
        return request_id

    def cancel(self, request_id: int) -> None:
        """End a request soon; its last pieces are still heard. An unknown or ended one is ignored."""
        with self._changed:
            self._ask(lambda: self.engine.cancel(request_id))

    def drain(self, timeout_s: float | None = None) -> bool:
        """Take no more requests and wait until all have ended; return whether they have."""
        with self._changed:
            self._refuse("The engine takes no more requests")
            return self._changed.wait_for(lambda: self._idle and not self._asked, timeout_s)

    def close(self) -> None:
        """Cancel what runs, end the thread and close the engine; once more does nothing."""
        with self._changed:
            self._refuse("The engine is closed")
            self._ending = True
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():  # from a listener
            self._thread.join()

    def call(self, what: Callable[[Engine], T]) -> T:
        """Do something with the engine between two steps, such as to add an adapter; return its result.

        Raises:
            EngineClosed: the engine drains, is closed or has failed; otherwise what `what` raises.
        """
        self._check_process()
        done: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._ask(lambda: _do(what, self.engine, done))
        return done.result()

    def stats(self) -> Stats:
        """Return the moment's numbers; from any thread."""
        return self.engine.stats()

    def _check_process(self) -> None:
        """Refuse what nobody would take up: threads stay behind where a process forks. Before any lock."""
        if self._thread.ident is not None and not self._ended and not self._thread.is_alive():
            raise EngineClosed(
                "The engine runs in the process that opened it, from which this one was forked",
                got=f"process {os.getpid()}",
                fix="Open the model here, or ask from threads instead of processes.",
            )

    def _check_open(self) -> None:
        if self._refusing is not None:
            raise EngineClosed(self._refusing, fix="Open the model again, or ask another server.")

    def _lost(self) -> None:
        with self._changed:
            self._ask(self.engine.runner.check)  # which raises, in the engine's thread

    def _ask(self, what: Callable[[], None]) -> None:
        if self._ended:  # nobody would take it up; what could be cancelled has ended
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
        except Exception as error:
            if not isinstance(error, RunnerLost):
                log.exception("The engine has a defect")
            finish, self.failure = "error", str(error) or repr(error)
        self._end(finish)

    def _take_up(self) -> bool:
        """Do what was asked, or wait until something is; return whether to step on."""
        with self._changed:
            while not (self._asked or self._ending or self.engine.has_work):
                self._idle = True
                self._changed.notify_all()
                self._changed.wait()
            self._idle = False
            num_asked = len(self._asked)
        for _ in range(num_asked):  # one at a time: if one shows that all is lost, the rest is told so
            self._asked.pop(0)()
        return not self._ending

    def _add(self, request: Request, request_id: int, on_piece: OnPiece) -> None:
        self._listeners[request_id] = (on_piece, request.num_answers)
        try:
            self.engine.add(request, request_id=request_id)
        except PenstockError as error:  # `check` has let it through, and an adapter is gone by now
            for answer in range(request.num_answers):
                finish: Finish = "refused" if isinstance(error, UsageError) else "error"
                self._tell([Piece(request_id=request_id, answer=answer, finish=finish, error=str(error))])

    def _tell(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            on_piece, num_open = self._listeners[piece.request_id]
            if piece.finish is not None:
                if num_open == 1:
                    del self._listeners[piece.request_id]
                else:
                    self._listeners[piece.request_id] = (on_piece, num_open - 1)
            try:
                on_piece(piece)
            except Exception:
                log.exception("A listener failed request=%d", piece.request_id)
                self.engine.cancel(piece.request_id)

    def _end(self, finish: Finish) -> None:
        """Refuse what comes, end what is there, and tell everyone who listens."""
        with self._changed:
            self._refuse(self.failure or "The engine is closed")
            self._ended = True
            asked, self._asked = self._asked, []
        try:
            for what in asked:
                with suppress(RunnerLost):  # which is being told
                    what()
            self._tell(self.engine.close(finish, error=self.failure))
        except Exception:  # a defect, and this thread is the last that could speak of it
            log.exception("The engine could not be closed")
        for request_id, (_, num_open) in list(self._listeners.items()):
            self._tell([Piece(request_id=request_id, finish=finish, error=self.failure)] * num_open)
        with self._changed:
            self._idle = True
            self._changed.notify_all()


def _do(what: Callable[[Engine], T], engine: Engine, done: "Future[T]") -> None:
    try:
        done.set_result(what(engine))
    except Exception as error:
        done.set_exception(error)
        if isinstance(error, RunnerLost):
            raise
