"""The training loop: one function, to be read in one go and copied where it does not fit.

Each iteration takes one batch, one step, one record; it validates and saves when due. The ranks agree on a
request to stop inside the step, so all leave after the same one, with a checkpoint.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.checkpoint.layout import NUMERICS, Meta
from penstock.checkpoint.saver import RetentionPolicy, Saver
from penstock.checkpoint.storage import place_in
from penstock.core import clock
from penstock.core import config as configs
from penstock.core.log import EventLog
from penstock.core.rng import key_of
from penstock.devices import accelerator
from penstock.obs.meter import StepMeter
from penstock.obs.sinks import Record, Sink
from penstock.parallel.mesh import World, broadcast
from penstock.train.compile_ahead import compile_ahead
from penstock.train.control.requests import ControlReply
from penstock.train.objective import DeviceBatch
from penstock.train.optim.learning_rate import learning_rate
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.planned_changes import micro_batch_sizes, micro_rows
from penstock.train.record import MixtureLog, step_record
from penstock.train.state import TrainState
from penstock.train.step import ControlFlags, StepResult, train_step

if TYPE_CHECKING:
    from penstock.train.samples import PromptSamples

log = EventLog(__name__)


def train(
    state: TrainState,
    config: TrainConfig,
    world: World,
    *,
    meter: StepMeter,
    stop_requested: Callable[[], bool],
    sinks: Sequence[Sink],
    on_batch: Callable[[DeviceBatch, int], None],
    samples: "PromptSamples | None" = None,
) -> bool:
    """Train until the last step or a request to stop; return whether the run is finished.

    Args:
        stop_requested: called once a step, on every rank.
        sinks: receive rank 0's records.
        on_batch: called with every batch of this rank and its step, counted from 1.
        samples: prompts to answer now and then.
    """
    micro_batch_size_at, mixture = micro_batch_sizes(config.data), MixtureLog(state.loader)
    with open_saver(state, config) as saver, closing(iter(state.loader)) as batches:
        if state.step == 0 and config.run.start_from:
            answer_samples(samples, state, config, world, sinks)
        while state.step < config.run.steps:
            seed = key_of(config.run.seed, "step", state.step, state.mesh.data_rank)
            accelerator.seed_generators(world.device, seed % 2**63)
            rate = set_learning_rate(state, config)
            state.watch.begin(state.step + 1)
            meter.start()
            mixture.begin_step()
            rows_asked = micro_batch_size_at(state.step)
            batch = next(batches)
            meter.mark("data_wait")
            local, length = batch["input_ids"].shape
            rows = micro_rows(local, rows_asked)
            compile_ahead(state, batch, world, config.compile, rows=rows, mark=meter.mark)
            result = train_step(
                state,
                batch,
                world,
                micro_batch_size=rows,
                clip_norm=config.optim.clip_norm,
                asked=ControlFlags(stop_requested(), state.control is not None and state.control.has_news()),
                mark=meter.mark,
            )
            last = state.step == config.run.steps
            prepare_saves(saver, state)
            if state.outer is not None:
                state.outer.after(state.step, last=last)
                meter.mark("communication")
            on_batch(batch, state.step)
            rates = meter.finish(rows=local * state.mesh.layout.num_data, sequence_length=length)
            record = step_record(state, result, rates, learning_rate=rate) | saver.record() | mixture.record()
            emit(skip_event(state, result) if result.skipped else record, sinks)
            for event in [*mixture.events(), *state.watch.end(state.step, (local, length, rows), rates)]:
                emit(event, sinks)
            if result.stop:
                state.watch.stopping(clock.monotonic())
            follow_losses(state, result, config, world)
            replies = state.control.take_up() if result.news and state.control is not None else []
            for reply in replies:
                emit(request_event(reply), sinks)
            is_best, last = validate(state, config, world, sinks, rows=rows, last=last)
            if samples is not None and samples.is_due(state.step, last=last):
                answer_samples(samples, state, config, world, sinks)
            evaluate_tasks(state, config, world, sinks, last=last)
            due = (is_best or state.step % config.checkpoint.every == 0) and not result.skipped
            leaves = result.stop or state.is_told_to_leave()
            # not while steps are skipped: it would evict earlier checkpoints
            if last or leaves or due or any(reply.checkpoint for reply in replies):
                state.watch.doing("checkpoint", step=state.step)
                saver.save(state.tensors(), meta_of(state, config, world), layout=state.exchanges_under_way())
            if last or leaves:
                return last
    return True


def validate(
    state: TrainState, config: TrainConfig, world: World, sinks: Sequence[Sink], *, rows: int, last: bool
) -> tuple[bool, bool]:
    """Validate if it is due; return whether the loss is the best so far, and whether this step is the last.

    Args:
        rows: rows of a micro-batch.
        last: this is the last step of the recipe; an early stop may make it the last too.
    """
    if state.heldout is None or not (last or state.step % config.validate.every == 0):
        return False, last
    state.watch.doing("validation", step=state.step)
    with state.shown():
        record = state.objective.validate(state, world, rows=rows)
    emit(record, sinks)
    early = state.early_stop
    if early is None:
        return False, last
    loss = broadcast(world, record["validation_loss"])  # one loss: the ranks must decide alike
    is_best = early.add(state.step, loss)
    if not early.is_over:
        return is_best, last
    emit({"event": "early_stop", "step": state.step, **early.state_dict()}, sinks)
    return is_best, True


def evaluate_tasks(
    state: TrainState, config: TrainConfig, world: World, sinks: Sequence[Sink], *, last: bool
) -> None:
    """Evaluate the recipe's tasks on the live weights if they are due; every rank must call it."""
    if state.tasks is not None and (state.step % config.evaluate.every == 0 or last):
        state.watch.doing("evaluation", step=state.step)
        emit(state.tasks.record(state, config, world), sinks)


def answer_samples(
    samples: "PromptSamples | None",
    state: TrainState,
    config: TrainConfig,
    world: World,
    sinks: Sequence[Sink],
) -> None:
    """Answer the prompts, if there are any, and send the record; every rank must call it."""
    state.watch.doing("samples", step=state.step)
    if samples is not None and (record := samples.answer(state, config, world)) is not None:
        emit(record, sinks)


def set_learning_rate(state: TrainState, config: TrainConfig) -> float:
    """Set and return the learning rate of the next step."""
    rate = learning_rate(
        state.step, peak=config.optim.learning_rate, steps=config.run.steps, schedule=config.schedule
    )
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    return rate


def request_event(reply: ControlReply) -> Record:
    """Return the event of a request that was decided on after this step."""
    told = ("number", "taken_up", "said", "asked_by", "reason", "stop", "batch_size")
    decided = {name: value for name in told if (value := getattr(reply, name)) not in (None, "")}
    return {"event": "request", "step": reply.step, "time": clock.utc_now(), **decided}


def skip_event(state: TrainState, result: StepResult) -> Record:
    """Log a skipped step; return its event."""
    if state.mesh.rank == 0:
        log.warning(
            "skipped",
            "Step {step:,} was skipped, the weights were not changed. {reason}",
            step=state.step,
            reason=result.skipped,
        )
    is_finite = math.isfinite(result.loss) and math.isfinite(result.grad_norm)
    return {"event": "skipped", "step": state.step, "why": result.skipped, "is_finite": is_finite}


def emit(record: Record, sinks: Sequence[Sink]) -> None:
    """Send a record to every sink."""
    for sink in sinks:
        sink(record)


def follow_losses(state: TrainState, result: StepResult, config: TrainConfig, world: World) -> None:
    """Update the mixture by the recipe's adaptive policy, if it has one."""
    adaptive = state.adaptive
    if adaptive is None or result.skipped:
        return
    adaptive.add(result.corpus_sums, result.corpus_labels)
    if adaptive.is_due(state.step):
        decided = adaptive.decide(state.loader.weights)  # equal on all ranks, if their processors agree
        state.loader.set_weights(broadcast(world, decided), reason=config.data.adaptive.policy)


def open_saver(state: TrainState, config: TrainConfig) -> Saver:
    """Return the checkpoint saver of a run."""
    wanted = config.checkpoint
    keeping = RetentionPolicy(newest=wanted.keep, every=wanted.keep_every, max_failures=wanted.max_failures)
    return Saver(
        place_in(Path(config.run.dir), wanted.dir),
        keeping,
        resumed_step=state.step,
        waiting=lambda: state.watch.doing("checkpoint", step=state.step),
    )


def prepare_saves(saver: Saver, state: TrainState) -> None:
    """Prepare the saver after the first step, and so before its first save."""
    if not saver.is_prepared:
        saver.prepare(state.tensors(), layout=state.exchanges_under_way())


def meta_of(state: TrainState, config: TrainConfig, world: World) -> Meta:
    """Return the metadata of a checkpoint: all that a run needs to continue, besides tensors."""
    return Meta(
        numerics=NUMERICS,
        kernels=configs.dump(state.kernels),
        step=state.step,
        tokens=state.loader.tokens_before(state.step),
        model=config.model,
        loader=state.loader.state_dict(),
        adaptive=state.adaptive.state_dict() if state.adaptive else {},
        outer=state.outer.state_dict() if state.outer else {},
        early_stop=state.early_stop.state_dict() if state.early_stop else {},
        seed=config.run.seed,
        world_size=world.ranks.world_size,
        start_from=config.run.start_from,
        start_step=config.run.start_step,
        start_hash=config.run.start_hash,
        adapter=config.adapter,
        saved_at=clock.utc_now(),
    )
