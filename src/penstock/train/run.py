"""One process's part of a run: join the ranks, hold the folder, set up, loop, leave."""

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from penstock.core import clock, log
from penstock.core import config as configs
from penstock.core.files import exclusive
from penstock.core.signals import StopFlag
from penstock.nn.float8 import RECIPES, has_native
from penstock.obs.meter import StepMeter
from penstock.obs.names import METRICS_FILE, SAMPLES_FOLDER, TENSORBOARD_FOLDER
from penstock.obs.peak import peak_flops
from penstock.obs.phases import Phases, stamps_for
from penstock.obs.sinks import Sink
from penstock.obs.sinks.console import ProgressLine
from penstock.obs.sinks.jsonl import JsonLines, rewind
from penstock.obs.sinks.tensorboard import TensorBoard
from penstock.obs.sinks.wandb import WeightsAndBiases
from penstock.parallel.fsdp_waits import count_blocked
from penstock.parallel.mesh import World, is_of_lost_peer, join
from penstock.parallel.recompute_plan import multiplied_again
from penstock.parallel.recorder import TrafficMeter
from penstock.train.config import TrainConfig
from penstock.train.control import Control
from penstock.train.deadline import Deadline
from penstock.train.guard import Rewind
from penstock.train.left_out import leave_out
from penstock.train.loop import train
from penstock.train.memory_plan import recompute_modes
from penstock.train.record import sample_log
from penstock.train.rewind import go_back
from penstock.train.setup import open_state, write_identity
from penstock.train.state import TrainState
from penstock.train.stragglers import Stragglers
from penstock.train.tracing import Windows
from penstock.train.watch import Watch
from penstock.train.watchdog import Watchdog

logger = logging.getLogger(__name__)

_TIMEOUT_S = 600.0  # of a collective; the watchdog, which says more, comes first
_EMULATED = 2.0  # times slower than float32: the processor has no instructions for the type


def run(recipe: TrainConfig, flag: StopFlag, plan: Callable[[World], TrainConfig] | None = None) -> bool:
    """Train on this rank; return whether the run is finished (else it was asked to stop, and saved).

    Args:
        plan: gives the recipe with what it leaves open, once the ranks know each other.

    Raises:
        RunLocked: another process writes the run's folder.
        PenstockError: see `open_state` and `train`.
    """
    folder = Path(recipe.run.dir)
    with ExitStack() as stack:
        world = stack.enter_context(join(timeout_s=max(_TIMEOUT_S, 2 * recipe.guard.hang_s)))
        log.set_up(rank=world.ranks.rank)
        if world.is_first:
            stack.enter_context(exclusive(folder, purpose="penstock train"))
        dist.barrier()  # the others go on when the folder is held
        if plan is not None:
            recipe = plan(world)
        rewinds = 0
        while True:
            try:
                return _train(recipe, flag, world)
            except Rewind as asked:
                rewinds += 1
                go_back(recipe, world, asked, rewinds=rewinds)
            gc.collect()  # the model that was given up goes before the next is built


def _train(recipe: TrainConfig, flag: StopFlag, world: World) -> bool:
    """Train from the newest checkpoint on; return whether the run is finished."""
    with ExitStack() as stack:
        state = open_state(recipe, world)
        if world.is_first:
            write_identity(recipe, state.loader)
        if state.step >= recipe.run.steps:
            logger.info("finished steps=%d; raise run.steps to go on", state.step)
            return True
        state.control = Control(recipe, state.loader, world)
        state.control.start()
        leave_out(Path(recipe.run.dir), state.loader, world)
        state.watch = _watch(recipe, state, world, stack)
        stack.push(partial(_hear_of_stop, flag, state.watch))
        sinks, samples = _open_logs(recipe, state, world, stack)
        finished = train(
            state,
            recipe,
            world,
            meter=_meter(recipe, state, world),
            stop_requested=partial(_stop_requested, flag, state.watch),
            sinks=sinks,
            on_batch=sample_log(samples),
        )
    if world.is_first and not finished:
        logger.info("stopped on request step=%d; run the same command to resume", state.step)
    return finished


def _stop_requested(flag: StopFlag, watch: Watch) -> bool:
    if flag.requested_by is None:
        return False
    watch.stopping(flag.requested_at)
    return True


def _hear_of_stop(flag: StopFlag, watch: Watch, _: object, error: BaseException | None, __: object) -> None:
    """Ask once more when a peer is gone: it may have left because its time to stop was over."""
    if error is not None and is_of_lost_peer(error):
        _stop_requested(flag, watch)


def _watch(recipe: TrainConfig, state: TrainState, world: World, stack: ExitStack) -> Watch:
    folder, guard, who = Path(recipe.run.dir), recipe.guard, world.ranks
    watchdog = Watchdog(folder, rank=who.rank, world_size=who.world_size, hang_s=guard.hang_s)
    windows = Windows(recipe.measure, folder, rank=who.rank, device=world.device)
    return Watch(
        deadline=stack.enter_context(Deadline(guard.stop_within_s, says=world.is_first)),
        watchdog=stack.enter_context(watchdog),
        windows=stack.enter_context(windows),
        traffic=TrafficMeter(state.mesh, sent_by_stages=_sent_by_stages(state)),
        stragglers=Stragglers(world, every=guard.straggler_every, ratio=guard.straggler_ratio),
    )


def _sent_by_stages(state: TrainState) -> Callable[[], int]:
    pipeline = state.pipeline
    return (lambda: 0) if pipeline is None else lambda: pipeline.sent_bytes


def _open_logs(
    recipe: TrainConfig, state: TrainState, world: World, stack: ExitStack
) -> tuple[list[Sink], JsonLines | None]:
    """Open rank 0's sinks and this rank's sample log, rewound to the step the run resumes from."""
    folder = Path(recipe.run.dir)
    sinks: list[Sink] = []
    if world.is_first:
        metrics = folder / METRICS_FILE
        for path in (metrics, *(folder / SAMPLES_FOLDER).glob("*.jsonl")):
            rewind(path, step=state.step)
        file = JsonLines(metrics)
        stack.callback(file.close)
        file({"event": "start", "step": state.step, "ranks": world.ranks.world_size, "time": clock.utc_now()})
        sinks = [file, stack.enter_context(ProgressLine(steps=recipe.run.steps, done=state.step))]
        sinks += _optional_sinks(recipe, state, stack)
    dist.barrier()
    if not (recipe.run.log_samples and state.mesh.leads):
        return sinks, None
    samples = JsonLines(folder / SAMPLES_FOLDER / f"rank-{world.ranks.rank:05d}.jsonl")
    stack.callback(samples.close)
    return sinks, samples


def _optional_sinks(recipe: TrainConfig, state: TrainState, stack: ExitStack) -> list[Sink]:
    folder, asked = Path(recipe.run.dir), recipe.measure
    sinks: list[Sink] = []
    if asked.tensorboard:
        sinks.append(stack.enter_context(TensorBoard(folder / TENSORBOARD_FOLDER, done=state.step)))
    if asked.wandb_project:
        resolved = configs.dump(recipe)
        sinks.append(
            stack.enter_context(WeightsAndBiases(folder, project=asked.wandb_project, config=resolved))
        )
    return sinks


def _meter(recipe: TrainConfig, state: TrainState, world: World) -> StepMeter:
    peak = peak_flops(world.device, getattr(torch, recipe.compute))
    if world.is_first:
        _warn_of_emulation(recipe, world, peak)
    waits = world.device.type == "cpu" and world.ranks.world_size > 1
    blocked = count_blocked(state.model, num_shards=state.mesh.num_shards) if waits else lambda: 0.0
    return StepMeter(
        flops_per_token=recipe.model.flops_per_token,
        peak_flops=peak * world.ranks.world_size,
        recomputed_share=multiplied_again(recompute_modes(recipe, state.mesh.layout)),
        phases=Phases(stamps_for(world.device.type), blocked),
    )


def _warn_of_emulation(recipe: TrainConfig, world: World, peak: float) -> None:
    """Say what the hardware has no instructions for."""
    kind, linear = world.device.type, recipe.precision.linear
    if recipe.compute != "float32" and kind == "cpu":
        slower = peak_flops(world.device, torch.float32) / peak
        if slower > _EMULATED:
            logger.warning(
                "compute=%s is emulated here, %.0f times slower than float32; use --set compute=float32",
                recipe.compute,
                slower,
            )
    if linear != "compute" and not has_native(RECIPES[linear], kind):
        logger.warning(
            "precision.linear=%s is emulated here: it rounds as it should, and saves no time", linear
        )
