"""A training process: join the ranks, lock the folder, set up, loop, exit."""

import gc
import logging
import os
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from penstock.checkpoint.layout import NUMERICS, name_of, step_of
from penstock.checkpoint.storage import place_in
from penstock.core import clock, env, log
from penstock.core import config as configs
from penstock.core.errors import PassStopped
from penstock.core.files import exclusive
from penstock.core.log import EventLog
from penstock.core.signals import StopFlag
from penstock.core.toml import plain
from penstock.data.loader_state import ResumeChange
from penstock.devices import accelerator
from penstock.launch.local import EXIT_STOPPED
from penstock.nn.linear.float8 import RECIPES, has_native, may_compile
from penstock.obs.meter import Phases, StepMeter, stamps_for
from penstock.obs.metric_names import METRICS_FILE, RANKS_FILE, SAMPLES_FOLDER, TENSORBOARD_FOLDER
from penstock.obs.peak import measure_peak, peak_flops
from penstock.obs.sinks import Record, Sink
from penstock.obs.sinks.console import ProgressLine
from penstock.obs.sinks.jsonl import JsonLines, rewind
from penstock.parallel.activation_checkpointing_plan import multiplied_again
from penstock.parallel.flight_recorder import TrafficMeter
from penstock.parallel.mesh import World, broadcast, is_of_lost_peer, join
from penstock.train.control.listener import Control
from penstock.train.data_setup import checkpoints
from penstock.train.device_hours import DeviceHours
from penstock.train.early_stop import EarlyStop
from penstock.train.guard import Rewind
from penstock.train.kernels import changes_of
from penstock.train.loop import train
from penstock.train.monitors.deadline import Deadline
from penstock.train.monitors.rank_records import RankRecords
from penstock.train.monitors.step_monitors import StepMonitors, Stragglers
from penstock.train.monitors.tracing import Windows
from penstock.train.monitors.watchdog import Watchdog
from penstock.train.optim.learning_rate import learning_rate, shortened
from penstock.train.planning.capacity import check_device, check_host, may_have_accelerators, memory_of
from penstock.train.planning.memory import recompute_modes
from penstock.train.recipe.config import TrainConfig
from penstock.train.record import sample_log
from penstock.train.rewind import go_back, leave_out
from penstock.train.setup import open_state, write_identity
from penstock.train.starts import KeptRecipe
from penstock.train.state import TrainState

if TYPE_CHECKING:
    from penstock.train.samples import PromptSamples

logger = EventLog(__name__)

_TIMEOUT_S = 600.0  # of a collective; the watchdog, with a better report, comes first
_BEGIN_WITHIN_S = 20.0
_MIN_TIMEOUT_S = 60.0  # where guard.hang_s is short, so is the wait for a rank that froze while it started
_MAX_CHANGES = 20  # changed settings that are logged one by one
_RAISED = 1.02  # of the learning rate that was to be: more is a rise
_EMULATED = 2.0  # slowdown against float32 that means: no instructions for the dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPeak:
    """Peak performance of all devices of a run together."""

    flops: float | None
    """FLOP/s of all ranks; None if other work disturbed the measurement."""
    device: str
    """Device name of a rank."""
    threads: int
    """Number of threads of the first rank."""


def run(
    recipe: TrainConfig,
    flag: StopFlag,
    plan: Callable[[World], TrainConfig] | None = None,
    *,
    oversubscribe: bool = False,
) -> bool:
    """Train on this rank; return True if the run is finished, False if it was asked to stop, and saved.

    A stop before the first step ends the process: nothing is lost.

    Args:
        plan: returns the recipe with planned values, once the ranks have joined.
        oversubscribe: start a run that does not fit into memory.

    Raises:
        RunLocked: another process holds the run's folder.
        ConfigError: the run does not fit into the memory of its devices or its machine.
        PenstockError: see `open_state` and `train`.
    """
    folder = Path(recipe.run.dir)
    with ExitStack() as stack:
        begin = stack.enter_context(flag.starting(_end, patience_s=_patience_s()))
        world = stack.enter_context(join(timeout_s=_timeout_s(recipe.guard.hang_s)))
        log.set_up(rank=world.ranks.rank)
        if world.is_first:
            stack.enter_context(exclusive(folder, purpose="penstock train"))
        dist.barrier()  # the others continue once the folder is locked
        if plan is not None:
            recipe = plan(world)
        steps = broadcast(world, recipe.run.steps if world.is_first else None)  # of epochs, in its folder
        recipe = replace(recipe, run=replace(recipe.run, steps=steps))
        if plan is not None or may_have_accelerators():  # else it was checked before torch was imported
            _check_memory(recipe, world, oversubscribe=oversubscribe)
        hours = DeviceHours(folder / METRICS_FILE, num_devices=world.ranks.world_size)
        tried: list[str] = []
        while True:
            try:
                return _train(recipe, flag, begin, world, hours)
            except Rewind as asked:
                go_back(recipe, world, asked, tried=tried)
            gc.collect()  # frees the old model before the next is built


def _timeout_s(hang_s: float) -> float:
    """Return the seconds that a rank waits for others: while the run starts, no watchdog looks.

    >>> [_timeout_s(hang_s) for hang_s in (1, 15, 100, 300, 600)]
    [60.0, 60.0, 400.0, 600.0, 1200.0]
    """
    return float(max(_MIN_TIMEOUT_S, min(_TIMEOUT_S, 4 * hang_s), 2 * hang_s))


def _patience_s() -> float:
    """Return the seconds in which a rank that was asked to stop may still begin to train.

    The local launcher asks all ranks at once. On several machines only some may be asked: with the first step
    all learn of it, and save.
    """
    return 0.0 if env.ranks().world_size == 1 or env.has_launcher() else _BEGIN_WITHIN_S


def _end(_signal: str) -> None:
    if env.ranks().rank == 0:
        _say_stopped_early()
    logging.shutdown()
    os._exit(EXIT_STOPPED)


def _say_stopped_early() -> None:
    logger.info("stopped", "Stopped on request before the first step. Run the same command to continue")


def _check_memory(recipe: TrainConfig, world: World, *, oversubscribe: bool) -> None:
    device, here = world.device, env.local_world_size()
    is_away = accelerator.is_accelerator(device)
    needed = memory_of(recipe, world_size=world.ranks.world_size, here=here, on_cpu=not is_away)
    check_host(needed, here=here, oversubscribe=oversubscribe)
    if is_away:
        _, total = accelerator.free_and_total_bytes(device)
        check_device(needed, total, name=accelerator.name_of(device), oversubscribe=oversubscribe)


def _train(
    recipe: TrainConfig, flag: StopFlag, begin: Callable[[], None], world: World, hours: DeviceHours
) -> bool:
    """Train from the newest checkpoint; return True if the run is finished.

    Args:
        begin: called before the first step.
    """
    with ExitStack() as stack:
        try:
            state = open_state(recipe, world, stop_requested=lambda: flag.requested_by is not None)
        except PassStopped:
            if world.is_first:
                _say_stopped_early()
            return False
        if state.step >= recipe.run.steps or (state.early_stop is not None and state.early_stop.is_over):
            if world.is_first:
                _say_finished(recipe, state)
            return True
        kept = write_identity(recipe, state.loader) if world.is_first else None
        state.device_hours = hours
        state.control = Control(recipe, state.loader, world)
        state.control.start()
        leave_out(Path(recipe.run.dir), state.loader, world)
        state.watch = _watch(recipe, state, world, stack)
        if recipe.evaluate.tasks:
            from penstock.train.live_tasks import LiveTasks  # with lm-eval, which takes seconds

            state.tasks = LiveTasks(recipe, world)
        stack.push(partial(_hear_of_stop, flag, state.watch))
        peak = _peak(recipe, world)
        if world.is_first:
            _say_shortened(recipe)
        sinks, log_of_samples = _open_logs(recipe, state, world, kept, peak, stack)
        begin()
        finished = train(
            state,
            recipe,
            world,
            meter=_meter(recipe, state, world, peak),
            stop_requested=partial(_stop_requested, flag, state.watch),
            sinks=sinks,
            on_batch=sample_log(log_of_samples),
            samples=_samples(recipe, world),
        )
    if world.is_first and finished:
        _say_finished(recipe, state)
    elif world.is_first:
        logger.info(
            "stopped",
            "Stopped on request after step {step:,}. Run the same command to continue",
            step=state.step,
        )
    return finished


def _samples(recipe: TrainConfig, world: World) -> "PromptSamples | None":
    if not recipe.samples.every:
        return None
    from penstock.train.samples import open_samples  # with the engine, which takes half a second

    return open_samples(recipe, world)


def _say_finished(recipe: TrainConfig, state: TrainState) -> None:
    """Log that a run is finished, with next steps."""
    folder, step = recipe.run.dir, state.step
    if state.early_stop is not None and state.early_stop.is_over:
        _say_early_stop(recipe, state.early_stop, step)
        return
    quoted = shlex.quote(str(folder))
    use = f"penstock generate {quoted} --prompt TEXT" if recipe.tune is None else f"penstock chat {quoted}"
    logger.info(
        "finished",
        "Finished: {steps:,} steps are done. Raise {key} to continue. What to do next:\n"
        "  draw its curves as a page: penstock report {path:shell}\n"
        "  ask the model: {use}\n"
        "  convert it to a Hugging Face folder: penstock export {path:shell} --out FOLDER",
        steps=step,
        key=recipe.run.length_key,
        path=folder,
        use=use,
    )


def _say_early_stop(recipe: TrainConfig, early: EarlyStop, step: int) -> None:
    """Log that a run ended early, why, and where its best checkpoint is."""
    folder, saved = recipe.run.dir, [step_of(found.name) or 0 for found in checkpoints(recipe)]
    kept = max((one for one in saved if one <= early.best_step), default=0)  # a skipped step is not saved
    best = place_in(Path(folder), recipe.checkpoint.dir).url_of(name_of(kept)) if kept else ""
    why = f"no held-out loss of {early.waited} validations was a number"
    if early.best_step:
        why = (
            f"the held-out loss was best after step {early.best_step:,} ({early.best_loss:.4f}), and "
            f"{early.waited} validations since did not improve on it"
        )
    logger.info(
        "finished_early",
        "Finished early, after step {steps:,}: {reason}. Raise validate.stop_after to continue. To draw "
        "its curves as a page: penstock report {path:shell}",
        steps=step,
        reason=why,
        path=folder,
    )
    if best:
        logger.info(
            "best_checkpoint",
            "The checkpoint of step {step:,} is kept. The best loss was after step {best_step:,}. What "
            "to do next:\n"
            "  generate text: penstock generate {path:shell} --prompt TEXT\n"
            "  convert it to a Hugging Face folder: penstock export {path:shell} --out FOLDER",
            step=kept,
            best_step=early.best_step,
            path=best,
        )


def _stop_requested(flag: StopFlag, watch: StepMonitors) -> bool:
    if flag.requested_by is None:
        return False
    watch.stopping(flag.requested_at)
    return True


def _hear_of_stop(
    flag: StopFlag, watch: StepMonitors, _: object, error: BaseException | None, __: object
) -> None:
    """Check for a stop request when a peer is gone: it may have exited at its deadline."""
    if error is not None and is_of_lost_peer(error):
        _stop_requested(flag, watch)


def _watch(recipe: TrainConfig, state: TrainState, world: World, stack: ExitStack) -> StepMonitors:
    folder, guard, who = Path(recipe.run.dir), recipe.guard, world.ranks
    watchdog = Watchdog(folder, rank=who.rank, world_size=who.world_size, hang_s=guard.hang_s)
    windows = Windows(recipe.measure, folder, rank=who.rank, device=world.device)
    return StepMonitors(
        deadline=stack.enter_context(Deadline(guard.stop_within_s, says=world.is_first)),
        watchdog=stack.enter_context(watchdog),
        windows=stack.enter_context(windows),
        traffic=TrafficMeter(state.mesh, sent_by_stages=_sent_by_stages(state)),
        stragglers=Stragglers(world, every=guard.straggler_every, ratio=guard.straggler_ratio),
        ranks=_rank_records(folder, state, world, stack) if who.world_size > 1 else None,
    )


def _rank_records(folder: Path, state: TrainState, world: World, stack: ExitStack) -> RankRecords:
    if not world.is_first:
        return RankRecords(world, None, step=state.step)
    file = JsonLines(folder / RANKS_FILE)
    stack.callback(file.close)
    return RankRecords(world, file, step=state.step)


def _sent_by_stages(state: TrainState) -> Callable[[], int]:
    pipeline = state.pipeline
    return (lambda: 0) if pipeline is None else lambda: pipeline.sent_bytes


def _open_logs(
    recipe: TrainConfig,
    state: TrainState,
    world: World,
    kept: KeptRecipe | None,
    peak: RunPeak,
    stack: ExitStack,
) -> tuple[list[Sink], JsonLines | None]:
    """Open rank 0's sinks and this rank's sample log, rewound to the step from which the run resumes."""
    folder = Path(recipe.run.dir)
    sinks: list[Sink] = []
    if kept is not None:
        metrics = folder / METRICS_FILE
        for path in (metrics, folder / RANKS_FILE, *(folder / SAMPLES_FOLDER).glob("*.jsonl")):
            rewind(path, step=state.step)
        file = JsonLines(metrics)
        stack.callback(file.close)
        file(_start_record(state, world, kept, peak))
        _say_changes(kept)
        _say_raised_rate(recipe, kept, step=state.step)
        for change in _resume_changes(state):
            file({"event": "resume_change", **asdict(change)})
        _say_kernels(state)
        sinks = [file, stack.enter_context(ProgressLine(steps=recipe.run.steps, done=state.step))]
        sinks += _optional_sinks(recipe, state, stack)
    dist.barrier()
    if not (recipe.run.log_samples and state.mesh.leads):
        return sinks, None
    samples = JsonLines(folder / SAMPLES_FOLDER / f"rank-{world.ranks.rank:05d}.jsonl")
    stack.callback(samples.close)
    return sinks, samples


def _resume_changes(state: TrainState) -> list[ResumeChange]:
    """Return what this start does otherwise than the checkpoint that it resumed from."""
    found = list(state.loader.resume_changes)
    if state.resumed_numerics != NUMERICS:
        found.append(
            ResumeChange(
                step=state.step,
                setting="numerics",
                saved=state.resumed_numerics,
                told=NUMERICS,
                applied=True,
            )
        )
    found += [
        ResumeChange(step=state.step, setting=f"kernels.{name}", saved=before, told=now, applied=True)
        for name, (before, now) in changes_of(state.resumed_kernels, state.kernels).items()
    ]
    return found


def _say_kernels(state: TrainState) -> None:
    """Log the kernels that a resumed run computes with from here on, where they are others than before."""
    for name, (before, now) in changes_of(state.resumed_kernels, state.kernels).items():
        logger.warning(
            "kernel_changed",
            "From step {step:,} on, {operation} is computed by {now} instead of {before}",
            step=state.step + 1,
            operation=name,
            now=now,
            before=before,
        )


def _start_record(state: TrainState, world: World, kept: KeptRecipe, peak: RunPeak) -> Record:
    """Return the start event for metrics.jsonl."""
    return {
        "event": "start",
        "step": state.step,
        "ranks": world.ranks.world_size,
        "time": clock.utc_now(),
        "device": peak.device,
        "threads": peak.threads,
        **({} if peak.flops is None else {"peak_flops": peak.flops}),
        "kernels": configs.dump(state.kernels)["rows"],
        "recipe": kept.file,
        "changes": {name: list(values) for name, values in kept.changes.items()},
    }


def _say_changes(kept: KeptRecipe) -> None:
    for name, (before, now) in [*kept.changes.items()][:_MAX_CHANGES]:
        logger.info(
            "setting_changed",
            "This start changes {setting} from {before} to {now}",
            setting=name,
            before=plain(before),
            now=plain(now),
        )
    if len(kept.changes) > _MAX_CHANGES:
        logger.info(
            "settings_changed",
            "This start changes {settings:#setting} in all: see {path}",
            settings=len(kept.changes),
            path=kept.file,
        )


def _say_shortened(recipe: TrainConfig) -> None:
    """Say that the schedule is fitted to a run that is shorter than its warm-up and decay."""
    if change := shortened(recipe.schedule, steps=recipe.run.steps):
        logger.info("schedule_shortened", "{change}", change=change)


def _say_raised_rate(recipe: TrainConfig, kept: KeptRecipe, *, step: int) -> None:
    """Say that the next step's learning rate is higher than it was to be, as that of a longer cosine is."""
    before = {name: old for name, (old, _) in kept.changes.items() if old is not None}
    prefix = "schedule."
    schedule = {name.removeprefix(prefix): old for name, old in before.items() if name.startswith(prefix)}
    steps = before.get("run.steps", recipe.run.steps)
    was = learning_rate(
        min(step, steps - 1),
        peak=before.get("optim.learning_rate", recipe.optim.learning_rate),
        steps=steps,
        schedule=replace(recipe.schedule, **schedule),
    )
    now = learning_rate(
        min(step, recipe.run.steps - 1),
        peak=recipe.optim.learning_rate,
        steps=recipe.run.steps,
        schedule=recipe.schedule,
    )
    if step and now > _RAISED * was:
        causes = [
            f"{name} is {plain(new)}, and was {plain(old)}"
            for name, (old, new) in kept.changes.items()
            if name in ("run.steps", "optim.learning_rate") or name.startswith(prefix)
        ]
        logger.warning(
            "learning_rate_raised",
            "The learning rate of step {step:,} rises from {before:.3g} to {now:.3g}: {causes}. "
            "To continue at {before:.3g}, set optim.learning_rate = {before:.3g} and "
            'schedule.rule = "constant"',
            step=step + 1,
            before=was,
            now=now,
            causes="; ".join(causes),
        )


def _optional_sinks(recipe: TrainConfig, state: TrainState, stack: ExitStack) -> list[Sink]:
    folder, asked = Path(recipe.run.dir), recipe.measure
    sinks: list[Sink] = []
    if asked.tensorboard:
        from penstock.obs.sinks.tensorboard import TensorBoard

        sinks.append(stack.enter_context(TensorBoard(folder / TENSORBOARD_FOLDER, done=state.step)))
    if asked.wandb_project:
        from penstock.obs.sinks.wandb import WeightsAndBiases

        resolved = configs.dump(recipe)
        sinks.append(
            stack.enter_context(WeightsAndBiases(folder, project=asked.wandb_project, config=resolved))
        )
    if asked.metrics_port:
        from penstock.obs.sinks.prometheus import PrometheusEndpoint

        endpoint = PrometheusEndpoint(
            asked.metrics_host,
            asked.metrics_port,
            run=folder.resolve().name,
            steps=recipe.run.steps,
            checkpoint_every=recipe.checkpoint.every,
        )
        sinks.append(stack.enter_context(endpoint))
    if (server := env.status_server()) is not None:
        from penstock.obs.sinks.train_job import TrainJobStatus

        sinks.append(stack.enter_context(TrainJobStatus(server, steps=recipe.run.steps)))
    return sinks


def _peak(recipe: TrainConfig, world: World) -> RunPeak:
    """Measure the peak of all ranks at once: ranks of a machine share its cores."""
    dist.barrier()
    mine = measure_peak(world.device, getattr(torch, recipe.compute))
    total, calm = world.sum(mine.flops, mine.is_calm)
    is_calm = calm == world.ranks.world_size
    device = accelerator.name_of(world.device)
    found = RunPeak(flops=total if is_calm else None, device=device, threads=torch.get_num_threads())
    if world.is_first:
        _say_peak(found, world)
        _warn_of_emulation(recipe, world, mine.flops)
    return found


def _say_peak(peak: RunPeak, world: World) -> None:
    ranks = world.ranks.world_size
    if peak.flops is None:
        logger.info(
            "peak",
            "Other work disturbed the measurement of the peak of {ranks:#process} of {threads:#thread}: "
            "no MFU is recorded for this start",
            ranks=ranks,
            threads=peak.threads,
        )
    else:
        logger.info(
            "peak",
            "Peak of {ranks:#process} of {threads:#thread} on {device}: {flop_per_s:flops}; MFU "
            "is relative to that",
            ranks=ranks,
            threads=peak.threads,
            device=peak.device,
            flop_per_s=peak.flops,
        )


def _meter(recipe: TrainConfig, state: TrainState, world: World, peak: RunPeak) -> StepMeter:
    waits = world.device.type == "cpu" and world.ranks.world_size > 1
    blocked: Callable[[], float] = lambda: 0.0  # noqa: E731
    if waits:
        from penstock.parallel.sharding.fsdp_waits import count_blocked

        blocked = count_blocked(state.model, num_shards=state.mesh.num_shards)
    blocks = [recipe.model.parameters_of([kind]) for kind in recipe.model.layers]
    return StepMeter(
        flops_per_token=recipe.model.flops_per_token,
        peak_flops=peak.flops,
        recomputed_share=multiplied_again(recompute_modes(recipe, state.mesh.layout), blocks),
        phases=Phases(stamps_for(world.device.type), blocked),
    )


def _warn_of_emulation(recipe: TrainConfig, world: World, peak: float) -> None:
    """Warn of formats that the hardware only emulates."""
    kind, linear = world.device.type, recipe.precision.linear
    if recipe.compute != "float32" and kind == "cpu":
        slower = peak_flops(world.device, torch.float32) / peak
        if slower > _EMULATED:
            logger.warning(
                "compute_emulated",
                "The setting compute = {compute!r} is emulated here, {slowdown:.0f} times slower than "
                "float32: use --set compute=float32",
                compute=recipe.compute,
                slowdown=slower,
            )
    if linear != "compute" and not has_native(RECIPES[linear], kind):
        logger.warning(
            "linear_emulated",
            "precision.linear = {linear!r} is emulated here: same rounding, no speedup",
            linear=linear,
        )
    if recipe.compile.enabled and not may_compile(RECIPES.get(linear), kind):
        logger.warning(
            "compile_left_out",
            "Blocks are not compiled: torch's compiler for CPUs fails on {linear}",
            linear=linear,
        )
