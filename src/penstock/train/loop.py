"""The training loop: a function, to be read in one go and copied when it does not fit.

Each turn takes one batch, one step, one record; now and then it validates and saves. A request to
stop is agreed on inside the step, so all ranks leave after the same one, with a checkpoint.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch

from penstock.checkpoint.layout import Meta
from penstock.checkpoint.save import save
from penstock.checkpoint.tensors import training_tensors
from penstock.core.rng import key_of
from penstock.obs.meter import StepMeter
from penstock.obs.sinks import Record, Sink
from penstock.parallel.mesh import World
from penstock.train.config import TrainConfig
from penstock.train.derived import micro_rows
from penstock.train.evaluate import heldout_loss
from penstock.train.record import step_record
from penstock.train.schedule import learning_rate
from penstock.train.state import Batch, TrainState
from penstock.train.step import train_step


def train(
    state: TrainState,
    config: TrainConfig,
    world: World,
    *,
    meter: StepMeter,
    stop_requested: Callable[[], bool],
    sinks: Sequence[Sink],
    on_batch: Callable[[Batch, int], None],
) -> bool:
    """Train until the last step or a request to stop; return whether the run is finished.

    Args:
        stop_requested: read once a step, on every rank.
        sinks: receive rank 0's records.
        on_batch: receives every batch of this rank and the step it was taken at, counted from 1.
    """
    rows = micro_rows(config, world_size=world.ranks.world_size)
    with closing(iter(state.loader)) as batches:
        while state.step < config.run.steps:
            torch.manual_seed(key_of(config.run.seed, "step", state.step, world.ranks.rank) % 2**63)
            rate = set_learning_rate(state, config)
            meter.start()
            batch = next(batches)
            meter.got_batch()
            result = train_step(
                state,
                batch,
                world,
                micro_batch_size=rows,
                clip_norm=config.optim.clip_norm,
                stop=stop_requested(),
            )
            on_batch(batch, state.step)
            record = step_record(state, result, meter.finish(), learning_rate=rate)
            emit(record, sinks)
            last = state.step == config.run.steps
            if state.heldout is not None and (state.step % config.validate.every == 0 or last):
                emit(
                    {"step": state.step, "validation_loss": validate(state, config, world, rows=rows)}, sinks
                )
            if last or result.stop or state.step % config.checkpoint.every == 0:
                checkpoint(state, config, world)
            if result.stop and not last:
                return False
    return True


def set_learning_rate(state: TrainState, config: TrainConfig) -> float:
    """Set and return the learning rate of the next step."""
    rate = learning_rate(
        state.step, peak=config.optim.learning_rate, steps=config.run.steps, schedule=config.schedule
    )
    for group in state.optimizer.param_groups:
        group["lr"] = rate
    return rate


def emit(record: Record, sinks: Sequence[Sink]) -> None:
    """Give a record to every sink."""
    for sink in sinks:
        sink(record)


def validate(state: TrainState, config: TrainConfig, world: World, *, rows: int) -> float:
    """Return the loss on the recipe's held-out samples."""
    assert state.heldout is not None
    samples = min(config.validate.samples, state.heldout.num_samples or 1)
    return heldout_loss(state.model, state.heldout, world, samples=samples, rows=rows)


def checkpoint(state: TrainState, config: TrainConfig, world: World) -> None:
    """Save everything a run needs to continue, in one commit."""
    meta = Meta(
        step=state.step,
        tokens=state.loader.tokens_before(state.step),
        model=config.model,
        loader=state.loader.state_dict(),
        seed=config.run.seed,
        world_size=world.ranks.world_size,
    )
    save(
        Path(config.run.dir),
        training_tensors(state.model, state.optimizer),
        meta,
        keep=config.checkpoint.keep,
    )
