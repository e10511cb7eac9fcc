"""Engine: requests in, output deltas out, one step at a time.

    plan = scheduler.schedule(now)          integers: which positions of which sequences
    output = runner.run(batch_of(plan))     one forward pass over all of them
    sampled = sample(plan, output)          the next tokens; CUDA graphs sample them in the forward pass
    scheduler.commit(plan, tokens)          append tokens; finished sequences release their blocks
    speculation.after(completed)            draft tokens for the next step to verify

The engine knows no threads; `background.py` runs it in one. An error in a step finishes the sequences of
that step with an error and no others; their blocks are free afterwards.
"""

import logging
from itertools import count
from pathlib import Path
from typing import Protocol

from penstock.core import clock
from penstock.core.errors import RunnerLost, UsageError, nearest
from penstock.engine.model_runner.batch import batch_of
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

log = logging.getLogger(__name__)


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


class Engine:
    """Inference engine for many concurrent requests. Not thread-safe: `background.EngineThread` runs it.

    Args:
        token_sampler: samples the next tokens.
        capacity: sizes of the KV cache and of a step.
        text_processor: tokenizer and chat template; None: deltas have token ids and no text.
        drafting: speculative decoding; None: every step adds one token per sequence.
        grammars: compiles grammars; None: requests with a grammar are refused.
        has_head: False: the model has no output matrix, and only "embed" tasks are computed.
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
    ) -> None:
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
        self._ended: list[OutputDelta] = []  # last deltas of sequences that ended outside a step
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
        if not self._has_head and (request.task != "embed" or request.num_prompt_logprobs is not None):
            raise UsageError(
                "The model's folder has no output matrix (lm_head.weight), so it computes embeddings and "
                "scores of texts, and cannot generate",
                fix="Serve a folder that has it, or ask /v1/embeddings or /v1/score.",
            )
        if request.adapter is not None:
            self._check_adapter(request.adapter)
        if request.grammar is not None:
            if self.grammars is None:
                raise UsageError("Grammars need a tokenizer, and there is none", fix="Leave the grammar out.")
            self.grammars.check(request)
        vocab_size = self.vocab_size_of(request.adapter)
        for tokens in (request.prompt, *request.continuations):  # further ids may be of another adapter
            check_token_ids(tokens, vocab_size=vocab_size)
        check_vocabulary(request.sampling, vocab_size=vocab_size)
        self.scheduler.check_fits(request)

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
        """Compute one step; return the deltas of all answers it extended or finished.

        Raises:
            RunnerLost: no further step can be computed; `close` then returns the last deltas of all answers.
        """
        begin = clock.monotonic()
        plan = self.scheduler.schedule(begin)
        deltas, self._ended = self._ended, []
        deltas += [self._end(sequence, "deadline") for sequence in plan.expired]
        if not plan.shares:
            return deltas
        try:
            sampled, done = self._compute(plan, begin)
        except RunnerLost:
            self._ended = deltas
            raise
        except Exception as error:  # a defect ends the answers of this step, not the engine
            log.exception("A step failed answers=%d tokens=%d", len(plan.shares), plan.num_tokens)
            self._counts.failed_steps += 1
            sampled = [SampledTokens(error=f"The engine failed to compute a step ({error!r})")] * len(
                plan.shares
            )
            done = None
        seconds = None if done is None else clock.monotonic() - begin
        deltas += self._commit_step(plan, sampled, seconds)
        if self._drafting is not None and done is not None:
            self._drafting.after(done, self._counts)
        return deltas

    def stats(self) -> Stats:
        """Return a snapshot of the statistics. Thread-safe."""
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
                "adapter %s has no rows for tokens that its chat template writes (%s), so its chats are "
                "refused: train them with PEFT's trainable_token_indices, or merge it with PEFT",
                name,
                ", ".join(missing),
            )

    def _check_adapter(self, name: str) -> None:
        known = self.runner.adapters
        if name not in known:
            hint = nearest(name, list(known)) if known else "The engine has no adapters."
            raise UsageError("Unknown adapter", got=name, fix=hint)

    def _compute(self, plan: StepPlan, begin: float) -> tuple[list[SampledTokens], CompletedStep]:
        batch = batch_of(plan, self.capacity.block_size, adapters=self.runner.adapters)
        draws = self._token_sampler.prepare(plan)
        scheduled = clock.monotonic()
        output = self.runner.run(batch, draws.settings)
        ran = clock.monotonic()
        sampled = self._token_sampler.draw(plan, output, draws)
        end = clock.monotonic()
        self._counts.steps += 1
        self._counts.tokens += plan.num_tokens
        self._counts.schedule_s += scheduled - begin
        self._counts.run_s += ran - scheduled
        self._counts.draw_s += end - ran
        tokens = [new.tokens for new in sampled]
        return sampled, CompletedStep(
            plan=plan, batch=batch, hidden=output.hidden, sampled=tokens, model_s=end - scheduled
        )

    def _commit_step(
        self, plan: StepPlan, sampled: list[SampledTokens], seconds: float | None
    ) -> list[OutputDelta]:
        """Append the sampled tokens, finish complete sequences, and return the deltas."""
        begin = clock.monotonic()
        shares = plan.shares
        deltas = [self._open[share.sequence.id].take(new) for share, new in zip(shares, sampled, strict=True)]
        for share, new, delta in zip(shares, sampled, deltas, strict=True):
            if delta is not None and delta.finish is not None and new.error is not None:
                self.scheduler.finish(share.sequence, delta.finish)  # before commit: it has no tokens
        committed = [new.tokens for share, new in zip(shares, sampled, strict=True) if share.samples]
        self.scheduler.commit(plan, committed, seconds=seconds)
        for share, delta in zip(shares, deltas, strict=True):
            if delta is not None and delta.finish is not None:
                self.scheduler.finish(share.sequence, delta.finish)
                self._forget(share.sequence)
        self._counts.sampled += sum(len(new.tokens) for new in sampled)
        self._counts.answer_s += clock.monotonic() - begin
        return [delta for delta in deltas if delta is not None]

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
