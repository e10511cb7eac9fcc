"""Engine: requests in, output deltas out, one step at a time.

    plan = scheduler.schedule(now)          integers: which positions of which sequences
    output = runner.run(batch_of(plan))     one forward pass over all of them; on GPUs it samples too
    sampled = draw(plan, output)            the tokens of the step before, while this one runs
    scheduler.fill(plan before, tokens)     write them; finished sequences release their blocks
    scheduler.advance(plan)                 count this step, so that the next one can be scheduled

A step whose tokens stay on the device is *in flight* until the next call of `step` has launched the next one,
which reads them there. So the device never waits for the host. A step is read at once, before its counts
change, where the host adds to it: runners that do not sample, grammars, penalties and other changes of
logits, log-probabilities, scores, embeddings, and drafts. Both kinds give the same answers: what is asked
from outside between two steps (`cancel`, a deadline) reads the step in flight first.

The engine knows no threads; `background.py` runs it in one. An error in a step finishes the sequences of
that step with an error and no others; their blocks are free afterwards.
"""

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from penstock.core import clock
from penstock.core.errors import GrammarRefused, RunnerLost, UsageError, nearest
from penstock.core.log import EventLog
from penstock.devices.kernel_table import KernelTable
from penstock.engine.model_runner.batch import StepBatch, batch_of
from penstock.engine.model_runner.capacity import Capacity
from penstock.engine.model_runner.interface import StepOutput, StepRunner
from penstock.engine.outputs import SampledTokens, SequenceOutput
from penstock.engine.prompts import check_token_ids
from penstock.engine.request import Finish, OutputDelta, Request
from penstock.engine.sampling.grammars_of_adapters import GrammarsOfAdapters
from penstock.engine.sampling.sampler import Draws
from penstock.engine.sampling_params import check_vocabulary
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.sequence import Sequence, StepPlan
from penstock.engine.speculation.speculation import CompletedStep, Speculation
from penstock.engine.stats import EngineCounters, Stats
from penstock.engine.text_processor import TextProcessor

log = EventLog(__name__)


class TokenSampler(Protocol):
    """Samples tokens for a step."""

    def prepare(self, plan: StepPlan) -> Draws:
        """Return what the tokens of a plan will be sampled by, before its logits are there."""
        ...

    def draw(self, plan: StepPlan, output: StepOutput, draws: Draws) -> list[SampledTokens]:
        """Return the sampled tokens of each share of a plan, in order."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished sequence."""
        ...


@dataclass(slots=True, kw_only=True)
class LaunchedStep:
    """A step between its launch and the reading of its tokens."""

    plan: StepPlan
    begin_s: float
    """When its scheduling began, in seconds of `clock.monotonic`."""
    batch: StepBatch | None = None
    draws: Draws = field(default_factory=Draws)
    output: StepOutput | None = None
    run_s: float = 0.0
    """When its batch was ready."""
    error: str | None = None
    """Why it failed."""
    is_unread: bool = False
    """True if its tokens stay on the device until the next step is launched."""

    def has(self, request_id: int) -> bool:
        """Return True if the step computes an answer to a request."""
        return any(share.sequence.request_id == request_id for share in self.plan.shares)


class Engine:
    """Inference engine for many concurrent requests. Not thread-safe: `background.EngineThread` runs it.

    Args:
        token_sampler: samples the next tokens.
        capacity: sizes of the KV cache and of a step.
        text_processor: tokenizer and chat template; None: deltas have token ids and no text.
        drafting: speculative decoding; None: every step adds one token per sequence.
        grammars: compiles grammars; None: requests with a grammar are refused.
        has_head: False: the model has no output matrix, and only "embed" tasks are computed.
        kernels: those that compute, to be shown; None: unknown.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: Scheduler,
        *,
        token_sampler: TokenSampler,
        capacity: Capacity,
        text_processor: TextProcessor | None,
        drafting: Speculation | None = None,
        grammars: GrammarsOfAdapters | None = None,
        has_head: bool = True,
        kernels: KernelTable | None = None,
    ) -> None:
        self.kernels = kernels or KernelTable()
        self.runner = runner
        self.scheduler = scheduler
        self.capacity = capacity
        self.text_processor = text_processor
        self.grammars = grammars
        self._token_sampler = token_sampler
        self._drafting = drafting
        self._has_head = has_head
        self._counts = EngineCounters()
        self._open: dict[int, SequenceOutput] = {}  # by sequence id
        self._requests: dict[int, list[Sequence]] = {}  # by request id; unfinished sequences only
        self._request_ids, self._sequence_ids = count(), count()
        self._ended: list[OutputDelta] = []  # deltas that came outside a step
        self._in_flight: LaunchedStep | None = None
        self._read_s = 0.0  # when the last tokens were read
        for name, own in () if text_processor is None else text_processor.adapters.items():
            self._look_for_rows(name, own)

    def check(self, request: Request) -> None:
        """Raise for a request that can never be computed. Thread-safe.

        A grammar that is not cached is compiled here, which may take seconds: call from a thread that may
        block.

        Raises:
            UsageError: the request needs more blocks than the cache has, its adapter is unknown, its
                grammar cannot be compiled, it names token ids that the model does not have, or it needs the
                output matrix of a model that has none.
        """
        if request.task != "embed" or request.num_prompt_logprobs is not None:
            self.check_generates()
        if request.adapter is not None:
            self._check_adapter(request.adapter)
        if request.grammar is not None:
            if self.grammars is None:
                raise UsageError("Grammars need a tokenizer, and there is none", fix="Leave the grammar out.")
            try:
                self.grammars.check(request)
            except UsageError as error:
                raise GrammarRefused(str(error)) from None
        vocab_size = self.vocab_size_of(request.adapter)
        for tokens in (request.prompt, *request.continuations):  # further ids may be of another adapter
            check_token_ids(tokens, vocab_size=vocab_size)
        check_vocabulary(request.sampling, vocab_size=vocab_size)
        self.scheduler.check_fits(request)

    def check_generates(self) -> None:
        """Refuse to generate with a model that has no output matrix. Thread-safe.

        Raises:
            UsageError: the model has none.
        """
        if not self._has_head:
            raise UsageError(
                "The model's folder has no output matrix (lm_head.weight), so it computes embeddings and "
                "scores of texts, and cannot generate",
                fix="Open a folder that has it, or ask `penstock serve` at /v1/embeddings or /v1/score.",
            )

    def vocab_size_of(self, adapter: str | None) -> int:
        """Return the number of token ids of an adapter's requests; None: of the model's own. Thread-safe."""
        more = 0 if adapter is None else self.runner.num_new_tokens.get(adapter, 0)
        return self.capacity.vocab_size + more

    def add(self, request: Request, *, request_id: int | None = None) -> int:
        """Queue a request and return its id.

        Args:
            request_id: an id that was never used before; None: the next one.

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
            text_processor = self.text_processor
            stream = (
                None
                if text_processor is None
                else text_processor.of(request.adapter).stream(request.stop_texts, shown=request.shown_ids)
            )
            self._open[sequence.id] = SequenceOutput(sequence, stream)
            sequences.append(sequence)
            self.scheduler.add(sequence)
        return request_id

    def cancel(self, request_id: int, finish: Finish = "cancelled", *, error: str | None = None) -> None:
        """Finish the answers of a request; their last deltas come with the next step. Unknown ids are
        ignored."""
        if self._in_flight is not None and self._in_flight.has(request_id):
            self._ended += self._land()
        for sequence in tuple(self._requests.get(request_id, ())):
            self.scheduler.cancel(sequence.id, finish)
            self._ended.append(self._end(sequence, finish, error))

    def add_adapter(self, name: str, folder: Path, *, text_processor: TextProcessor | None = None) -> None:
        """Load an adapter for later requests; call between two steps.

        Args:
            text_processor: from `TextProcessor.read_adapter`, which takes long; None: it is read here.

        Raises:
            InputError, UsageError: the name is taken, or a file of the folder is not valid JSON or no
                tokenizer.
            ModelError: the folder is not a LoRA adapter of this model.
        """
        if self.text_processor is None:
            self.runner.add_adapter(name, folder)
            return
        # first: once the runner has the name, other threads make requests of it
        own = text_processor or self.text_processor.read_adapter(folder)
        self.runner.add_adapter(name, folder)
        self.text_processor.adapters[name] = own
        self._look_for_rows(name, own)
        if self.grammars is not None:
            self.grammars.add(name, own, vocab_size=self.vocab_size_of(name))

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that no request uses; call between two steps.

        Raises:
            UsageError: the name is unknown, or requests that use the adapter are unfinished.
        """
        self._check_adapter(name)
        if using := sum(answers[0].request.adapter == name for answers in self._requests.values()):
            raise UsageError(
                "An adapter cannot be removed while requests use it",
                got=using,
                fix="Wait for these requests, or cancel them.",
            )
        self.runner.remove_adapter(name)
        self.scheduler.pool.forget_idle()  # cached blocks of this adapter: its name may be used again
        if self.text_processor is not None:
            self.text_processor.remove_adapter(name)
            if self.grammars is not None:
                self.grammars.remove(name)

    @property
    def has_work(self) -> bool:
        """True if `step` has anything to compute or to return."""
        return bool(self._open or self._ended)

    def step(self) -> list[OutputDelta]:
        """Launch a step; return the deltas of the steps that were read: the one in flight, or this one too.

        Raises:
            RunnerLost: no further step can be computed; `close` then returns the last deltas of all answers.
        """
        begin = clock.monotonic()
        deltas, self._ended = self._ended, []
        if self.scheduler.expires(begin):
            deltas += self._land()
        plan = self.scheduler.schedule(begin)
        deltas += [self._end(sequence, "deadline") for sequence in plan.expired]
        if not plan.shares:
            return deltas + self._land()
        try:
            step = self._launch(plan, begin)
            deltas += self._land()  # while this step runs
            if not step.is_unread:
                deltas += self._commit_step(step)
            elif any(share.sequence.finish is None for share in plan.shares):
                self.scheduler.advance(plan)
                self._in_flight = step
        except RunnerLost:
            self._ended = deltas
            raise
        return deltas

    def stats(self) -> Stats:
        """Return a snapshot of the statistics. Thread-safe."""
        pool, counts = self.scheduler.pool, self.scheduler.counts
        return Stats(
            waiting=self.scheduler.num_waiting,
            running=len(self.scheduler.running),
            num_blocks=pool.num_blocks,
            used_blocks=pool.num_used,
            preemptions=counts.num_preempted,
            prefix_asked=counts.num_asked,
            prefix_found=counts.num_found,
            counts=self._counts,
        )

    def close(self, finish: Finish = "cancelled", *, error: str | None = None) -> list[OutputDelta]:
        """Finish all answers, free the runner and return the last deltas. Idempotent.

        Args:
            error: the failure, if `finish` is "error".
        """
        for request_id in tuple(self._requests):
            self.cancel(request_id, finish, error=error)
        deltas, self._ended = self._ended, []
        self.runner.close()
        return deltas

    def _look_for_rows(self, name: str, text_processor: TextProcessor) -> None:
        """Log an adapter whose conversations will be refused, each as a prompt outside the vocabulary."""
        if missing := text_processor.names_without_rows(self.vocab_size_of(name)):
            log.warning(
                "adapter_without_rows",
                "Adapter {adapter} has no rows for tokens that its chat template writes ({tokens}), "
                "so its chats are refused: train them with PEFT's trainable_token_indices, or merge "
                "it with PEFT",
                adapter=name,
                tokens=", ".join(missing),
            )

    def _check_adapter(self, name: str) -> None:
        known = self.runner.adapters
        if name not in known:
            hint = nearest(name, list(known)) if known else "The engine has no adapters."
            raise UsageError("Unknown adapter", got=name, fix=hint)

    def _launch(self, plan: StepPlan, begin: float) -> LaunchedStep:
        step = LaunchedStep(plan=plan, begin_s=begin)
        try:
            step.batch = batch_of(plan, self.capacity.block_size, adapters=self.runner.adapters)
            step.draws = self._token_sampler.prepare(plan)
            samples = step.draws.is_plain and self._drafting is None
            step.run_s = clock.monotonic()
            step.output = self.runner.run(step.batch, step.draws.settings, samples=samples)
        except RunnerLost:
            raise
        except Exception as error:
            self._fail(step, error)
        else:
            step.is_unread = samples and step.output.drawn is not None
            self._counts.steps += 1
            self._counts.tokens += plan.num_tokens
            self._counts.schedule_s += step.run_s - begin
            self._counts.run_s += clock.monotonic() - step.run_s
        return step

    def _land(self) -> list[OutputDelta]:
        """Read the step in flight; return its deltas."""
        step, self._in_flight = self._in_flight, None
        return [] if step is None else self._commit_step(step)

    def _sampled(self, step: LaunchedStep) -> list[SampledTokens]:
        """Return the tokens of each share, or why there are none; waits for the device."""
        begin = clock.monotonic()
        if step.output is not None:
            try:
                sampled = self._token_sampler.draw(step.plan, step.output, step.draws)
            except RunnerLost:
                raise
            except Exception as error:
                self._fail(step, error)
            else:
                self._counts.draw_s += clock.monotonic() - begin
                return sampled
        return [SampledTokens(error=step.error)] * len(step.plan.shares)

    def _fail(self, step: LaunchedStep, error: Exception) -> None:
        """Record a defect: it ends the answers of a step, not the engine."""
        log.exception(
            "step_failed",
            "A step of {tokens:#token} for {answers:#answer} failed",
            tokens=step.plan.num_tokens,
            answers=len(step.plan.shares),
        )
        self._counts.failed_steps += 1
        step.error = f"The engine failed to compute a step ({error!r})"

    def _commit_step(self, step: LaunchedStep) -> list[OutputDelta]:
        """Read and append a step's tokens, finish complete sequences, and return the deltas."""
        shares = step.plan.shares
        sampled = self._sampled(step)
        begin = clock.monotonic()
        seconds = begin - max(step.begin_s, self._read_s) if step.error is None else None
        self._read_s = begin
        outputs = [self._open.get(share.sequence.id) for share in shares]  # None: it ended before this step
        deltas = [
            None if output is None else output.take(new) for output, new in zip(outputs, sampled, strict=True)
        ]
        for share, new, delta in zip(shares, sampled, deltas, strict=True):
            if delta is not None and delta.finish is not None and new.error is not None:
                self.scheduler.finish(share.sequence, delta.finish)  # before its counts change
        tokens = [new.tokens for share, new in zip(shares, sampled, strict=True) if share.samples]
        record = self.scheduler.fill if step.is_unread else self.scheduler.commit
        record(step.plan, tokens, seconds=seconds)
        for share, delta in zip(shares, deltas, strict=True):
            if delta is not None and delta.finish is not None:
                self.scheduler.finish(share.sequence, delta.finish)
                self._forget(share.sequence)
        self._counts.sampled += sum(
            len(new.tokens) for output, new in zip(outputs, sampled, strict=True) if output is not None
        )
        self._counts.answer_s += clock.monotonic() - begin
        if self._drafting is not None and step.error is None:
            self._draft(step, sampled, model_s=begin - step.run_s)
        return [delta for delta in deltas if delta is not None]

    def _draft(self, step: LaunchedStep, sampled: list[SampledTokens], *, model_s: float) -> None:
        assert self._drafting is not None
        assert step.batch is not None
        assert step.output is not None
        done = CompletedStep(
            plan=step.plan,
            batch=step.batch,
            hidden=step.output.hidden,
            sampled=[new.tokens for new in sampled],
            model_s=model_s,
        )
        self._drafting.after(done, self._counts)

    def _end(self, sequence: Sequence, finish: Finish, error: str | None = None) -> OutputDelta:
        delta = self._open[sequence.id].end(finish, error=error)
        self._forget(sequence)
        return delta

    def _forget(self, sequence: Sequence) -> None:
        del self._open[sequence.id]
        self._token_sampler.forget(sequence)
        if self._drafting is not None:
            self._drafting.forget(sequence)
        others = self._requests[sequence.request_id]
        others.remove(sequence)
        if not others:
            del self._requests[sequence.request_id]
            if self.grammars is not None:
                self.grammars.release(sequence.request)
