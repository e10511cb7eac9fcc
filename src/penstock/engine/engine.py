"""Requests in, pieces of answers out, one step at a time.

    plan = scheduler.schedule(now)          integers: which positions of which sequences
    output = runner.run(batch_of(plan))     the network, once over all of them
    drawn = draw(plan, output)              the next tokens
    scheduler.commit(plan, tokens)          the sequences are longer; those that ended give their blocks back
    drafting.after(done)                    guesses of what follows, for the next step to verify

Nothing here knows threads: `background.py` gives an engine one. An error in a step ends the answers that were
in it and no others; their blocks are free afterwards.
"""

import logging
from itertools import count
from pathlib import Path
from typing import Protocol

from penstock.core import clock
from penstock.core.errors import RunnerLost, UsageError, nearest
from penstock.engine.answers import Drawn, OpenAnswer
from penstock.engine.batch import batch_of
from penstock.engine.capacity import Capacity
from penstock.engine.drafting import Drafting
from penstock.engine.drafts.drafter import Done
from penstock.engine.grammars import Grammars
from penstock.engine.request import Finish, Piece, Request
from penstock.engine.runner import Output, Runs
from penstock.engine.sampling import check_bias
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.scheduling.step_plan import StepPlan
from penstock.engine.stats import Counts, Stats
from penstock.engine.words import Words

log = logging.getLogger(__name__)


class Draws(Protocol):
    """Chooses tokens."""

    def draw(self, plan: StepPlan, output: Output) -> list[Drawn]:
        """Return what each share of a plan gets."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept of a sequence that has ended."""
        ...


class Engine:
    """A model that answers many requests at once; for one thread.

    Args:
        drawer: chooses the next tokens.
        capacity: what its parts have room for.
        words: turns tokens into text; None: pieces have tokens only.
        drafting: guesses tokens ahead; None: every step adds one token to an answer.
        grammars: compiles what answers must follow; None: no request may ask for that.
    """

    def __init__(
        self,
        runner: Runs,
        scheduler: Scheduler,
        *,
        drawer: Draws,
        capacity: Capacity,
        words: Words | None,
        drafting: Drafting | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.capacity = capacity
        self.words = words
        self.grammars = grammars
        self._drawer = drawer
        self._drafting = drafting
        self._counts = Counts()
        self._open: dict[int, OpenAnswer] = {}  # by id of the sequence
        self._requests: dict[int, list[Sequence]] = {}  # by id; without those that have ended
        self._request_ids, self._sequence_ids = count(), count()
        self._ended: list[Piece] = []  # since the last step

    def check(self, request: Request) -> None:
        """Refuse a request that could never be answered; for any thread.

        A grammar is compiled here unless it is known, which may take seconds: whoever serves others asks from
        a thread that can wait.

        Raises:
            UsageError: it needs more blocks than there are, there is no such adapter, its grammar cannot
                be used, or it moves logits that the model does not have.
        """
        if request.adapter is not None:
            self._check_adapter(request.adapter)
        if request.grammar is not None:
            if self.grammars is None:
                raise UsageError("This engine has no tokenizer to follow a grammar with", fix="Ask without.")
            self.grammars.check(request)
        check_bias(request.sampling, vocab_size=self.capacity.vocab_size)
        self.scheduler.check_fits(request)

    def add(self, request: Request, *, request_id: int | None = None) -> int:
        """Queue a request; return its id.

        Args:
            request_id: an id that no other request has or had; None: the next one.

        Raises:
            UsageError: as in `check`.
        """
        self.check(request)
        request_id = next(self._request_ids) if request_id is None else request_id
        sequences = self._requests[request_id] = []
        if self.grammars is not None:
            self.grammars.hold(request)
        for answer in range(request.num_answers):
            sequence = Sequence(
                id=next(self._sequence_ids),
                request_id=request_id,
                answer=answer,
                request=request,
                tokens=list(request.prompt),
            )
            stream = None if self.words is None else self.words.stream(request.stop_texts)
            self._open[sequence.id] = OpenAnswer(sequence, stream)
            sequences.append(sequence)
            self.scheduler.add(sequence)
        return request_id

    def cancel(self, request_id: int, finish: Finish = "cancelled", *, error: str | None = None) -> None:
        """End the answers of a request, if there are any; their last pieces come with the next step."""
        for sequence in tuple(self._requests.get(request_id, ())):
            self.scheduler.cancel(sequence.id, finish)
            self._ended.append(self._end(sequence, finish, error))

    def add_adapter(self, name: str, folder: Path) -> None:
        """Open an adapter, for requests that come from now on; between two steps.

        Raises:
            UsageError: there is one of that name.
            ModelError: it is no LoRA adapter of this model.
        """
        self.runner.add_adapter(name, folder)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that nobody uses; between two steps.

        Raises:
            UsageError: there is none of that name, or requests that use it have not ended.
        """
        self._check_adapter(name)
        if using := sum(answers[0].request.adapter == name for answers in self._requests.values()):
            raise UsageError(
                "An adapter cannot be removed while requests use it",
                got=using,
                fix="Wait for them, or cancel them.",
            )
        self.runner.remove_adapter(name)
        self.scheduler.pool.forget_idle()  # what was computed with it, should another come under its name

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to compute or tell."""
        return bool(self._open or self._ended)

    def step(self) -> list[Piece]:
        """Compute one step; return what it added to the answers.

        Raises:
            RunnerLost: no step can be computed any more; `close` returns the last pieces of all answers.
        """
        begin = clock.monotonic()
        plan = self.scheduler.schedule(begin)
        pieces, self._ended = self._ended, []
        pieces += [self._end(sequence, "deadline") for sequence in plan.expired]
        if not plan.shares:
            return pieces
        try:
            drawn, done = self._compute(plan, begin)
        except RunnerLost:
            self._ended = pieces
            raise
        except Exception as error:
            log.exception("A step failed answers=%d tokens=%d", len(plan.shares), plan.num_tokens)
            self._counts.failed_steps += 1
            drawn = [Drawn(error=f"The engine failed to compute a step ({error!r})")] * len(plan.shares)
            done = None
        seconds = None if done is None else clock.monotonic() - begin
        pieces += self._told(plan, drawn, seconds)
        if self._drafting is not None and done is not None:
            self._drafting.after(done, self._counts)
        return pieces

    def stats(self) -> Stats:
        """Return the moment's numbers; for any thread."""
        pool, counts = self.scheduler.pool, self.scheduler.counts
        return Stats(
            waiting=len(self._open) - len(self.scheduler.running),
            running=len(self.scheduler.running),
            num_blocks=pool.num_blocks,
            used_blocks=pool.num_used,
            preemptions=counts.num_preempted,
            prefix_asked=counts.num_asked,
            prefix_found=counts.num_found,
            counts=self._counts,
        )

    def close(self, finish: Finish = "cancelled", *, error: str | None = None) -> list[Piece]:
        """End all answers and free what the runner holds; return their last pieces. Once more does nothing.

        Args:
            error: what failed, where `finish` is "error".
        """
        for request_id in tuple(self._requests):
            self.cancel(request_id, finish, error=error)
        pieces, self._ended = self._ended, []
        self.runner.close()
        return pieces

    def _check_adapter(self, name: str) -> None:
        known = self.runner.adapters
        if name not in known:
            hint = nearest(name, list(known)) if known else "The engine has none."
            raise UsageError("There is no adapter of that name", got=name, fix=hint)

    def _compute(self, plan: StepPlan, begin: float) -> tuple[list[Drawn], Done]:
        batch = batch_of(plan, self.capacity.block_size, adapters=self.runner.adapters)
        scheduled = clock.monotonic()
        output = self.runner.run(batch)
        ran = clock.monotonic()
        drawn = self._drawer.draw(plan, output)
        end = clock.monotonic()
        self._counts.steps += 1
        self._counts.tokens += plan.num_tokens
        self._counts.schedule_s += scheduled - begin
        self._counts.run_s += ran - scheduled
        self._counts.draw_s += end - ran
        tokens = [new.tokens for new in drawn]
        return drawn, Done(
            plan=plan, batch=batch, hidden=output.hidden, drawn=tokens, model_s=end - scheduled
        )

    def _told(self, plan: StepPlan, drawn: list[Drawn], seconds: float | None) -> list[Piece]:
        """Lengthen the sequences, end those that are complete, and say what was added."""
        begin = clock.monotonic()
        shares = plan.shares
        pieces = [self._open[share.sequence.id].take(new) for share, new in zip(shares, drawn, strict=True)]
        for share, new, piece in zip(shares, drawn, pieces, strict=True):
            if piece is not None and piece.finish is not None and new.error is not None:
                self.scheduler.finish(share.sequence, piece.finish)  # before: there is nothing to commit
        sampled = [new.tokens for share, new in zip(shares, drawn, strict=True) if share.samples]
        self.scheduler.commit(plan, sampled, seconds=seconds)
        for share, piece in zip(shares, pieces, strict=True):
            if piece is not None and piece.finish is not None:
                self.scheduler.finish(share.sequence, piece.finish)
                self._forget(share.sequence)
        self._counts.drawn += sum(len(new.tokens) for new in drawn)
        self._counts.answer_s += clock.monotonic() - begin
        return [piece for piece in pieces if piece is not None]

    def _end(self, sequence: Sequence, finish: Finish, error: str | None = None) -> Piece:
        piece = self._open[sequence.id].end(finish, error=error)
        self._forget(sequence)
        return piece

    def _forget(self, sequence: Sequence) -> None:
        del self._open[sequence.id]
        self._drawer.forget(sequence)
        if self._drafting is not None:
            self._drafting.forget(sequence)
        others = self._requests[sequence.request_id]
        others.remove(sequence)
        if not others:
            del self._requests[sequence.request_id]
            if self.grammars is not None:
                self.grammars.release(sequence.request)
