"""Train a recipe on emulated hosts for a few steps, and measure the cost of the network.

The measure is the busy share: the time of the computation divided by that of a step. The computation is timed
on unsharded replicas, one per rank, with as many rows in the same micro-batches, all at once and without
communication; so they share this machine's cores as the ranks of the run do.
"""

import dataclasses
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.core.errors import PenstockError, UsageError
from penstock.core.signals import StopFlag
from penstock.core.units import plural
from penstock.launch.local import EXIT_INTERRUPTED, EXIT_STOPPED, JobOutcome
from penstock.netlab.hosts import Hosts
from penstock.obs.meter import Phases, StepMeter, stamps_for
from penstock.obs.sinks import Record, Sink
from penstock.obs.sinks.console import ProgressLine
from penstock.obs.sinks.jsonl import JsonLines
from penstock.parallel.layout import ParallelConfig, layout_of
from penstock.parallel.mesh import join
from penstock.train.loop import train
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.outer_config import OuterConfig
from penstock.train.recipe.planned_changes import check_rows
from penstock.train.setup import open_state
from penstock.train.state import TrainState

Explain = Callable[[BaseException], tuple[str, int]]
Prepare = Callable[[TrainState], None]

_MIN_STEPS, _REPLICA_STEPS = 2, 5
_SENT = "sent"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedTimes:
    """Measurements of a few steps on emulated hosts; the first step, a warm-up, counts in the losses only."""

    step_s: float
    """Median wall time of a step; the mean if islands sync at some steps only."""
    compute_s: float
    """Median time of a step's forward and backward passes on an unsharded replica."""
    sent_bytes: list[float]
    """Mean bytes sent by each host per step, with the headers of Ethernet, IP and TCP."""
    losses: list[float]
    """Losses of all steps."""

    @property
    def busy(self) -> float:
        """Share of a step that the computation would take with an infinitely fast network."""
        return self.compute_s / self.step_s

    def as_json(self) -> dict[str, float | list[float]]:
        """Return the fields by name, with the busy share."""
        return {**dataclasses.asdict(self), "busy": self.busy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulation:
    """Settings of a trial on emulated hosts."""

    hosts: Hosts
    processes_per_host: int = 1
    steps: int = 5
    prepare: Prepare = lambda _: None
    """Called on every rank before the first step."""
    shows_progress: bool = False

    def __post_init__(self) -> None:
        if self.steps < _MIN_STEPS:
            raise UsageError(f"The number of steps must be at least {_MIN_STEPS}", got=self.steps)

    @property
    def world_size(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts.topology.num_hosts * self.processes_per_host

    def measure(
        self, recipe: TrainConfig, explain: Explain, *, compute_s: float | None = None
    ) -> EmulatedTimes:
        """Train in a temporary folder, and measure.

        Args:
            explain: converts an error of a rank to a message and an exit code.
            compute_s: result of an earlier call for the same rows on the same machine; None: it is
                measured.

        Raises:
            PenstockError: a rank failed; with its message.
            KeyboardInterrupt: the user interrupted it.
        """
        self._check(recipe)
        if compute_s is None:
            compute_s = self.time_replicas(recipe, explain)
        (records,) = self._train(recipe, explain, together=True)
        timed = records[1:]
        first, last = records[0][_SENT], timed[-1][_SENT]
        average = statistics.mean if recipe.outer.every else statistics.median
        return EmulatedTimes(
            step_s=average(record["step_s"] for record in timed),
            compute_s=compute_s,
            sent_bytes=[(then - before) / len(timed) for before, then in zip(first, last, strict=True)],
            losses=[record["loss"] for record in records],
        )

    def _check(self, recipe: TrainConfig) -> None:
        """Refuse a recipe that cannot be tried, before anything runs."""
        check_rows(recipe, world_size=layout_of(recipe.parallel, world_size=self.world_size).num_data)
        if recipe.run.steps < self.steps:
            raise UsageError(
                f"The recipe ends after {plural(recipe.run.steps, 'step')}, before those to measure",
                got=self.steps,
                fix=f"Raise {recipe.run.length_key}, or measure fewer.",
            )
        if recipe.plan:
            raise UsageError(
                "A recipe cannot be planned for emulated hosts",
                got=recipe.plan,
                fix="Leave plan out, and set what `penstock plan` finds for a cluster with such links.",
            )

    def time_replicas(self, recipe: TrainConfig, explain: Explain) -> float:
        """Return the seconds of a step's computation per rank; see `measure`."""
        layout = layout_of(recipe.parallel, world_size=self.world_size)
        alone = dataclasses.replace(
            recipe,
            parallel=ParallelConfig(),
            outer=OuterConfig(),
            data=dataclasses.replace(
                recipe.data, global_batch_size=recipe.data.global_batch_size // layout.num_data
            ),
        )
        few = dataclasses.replace(self, steps=min(self.steps, _REPLICA_STEPS))
        ranks = few._train(alone, explain, together=False)
        seconds = [statistics.median(_computed_s(record) for record in records[1:]) for records in ranks]
        return statistics.mean(seconds) * layout.num_data / self.world_size  # ranks of one row share its work

    def _train(self, recipe: TrainConfig, explain: Explain, *, together: bool) -> list[list[Record]]:
        """Return the records of each job: one job of all ranks, or one per rank."""
        with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
            work = partial(self._one_rank, recipe, Path(folder))
            outcome = self.hosts.run(
                work, explain, processes_per_host=self.processes_per_host, together=together
            )
            _check_ended(outcome)
            files = sorted(Path(folder).glob("*.jsonl"))
            found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        if any(len(records) < _MIN_STEPS for records in found):
            raise PenstockError("Too few steps could be taken to measure any", fix="See the warnings above.")
        return found

    def _one_rank(self, recipe: TrainConfig, folder: Path) -> int:
        flag = StopFlag().install()
        with join() as world, ExitStack() as stack:
            name = "run" if world.ranks.world_size > 1 else str(os.getpid())
            recipe = dataclasses.replace(
                recipe, run=dataclasses.replace(recipe.run, dir=str(folder / name), log_samples=False)
            )
            state = open_state(recipe, world)
            self.prepare(state)
            shown = self.shows_progress and world.ranks.world_size > 1
            sinks = self._sinks(folder / f"{name}.jsonl", stack, shown=shown) if world.is_first else []
            train(
                state,
                recipe,
                world,
                meter=_meter(recipe),
                stop_requested=lambda: state.step >= self.steps or flag.requested_by is not None,
                sinks=sinks,
                on_batch=lambda *_: None,
            )
            return 0 if state.step >= self.steps else EXIT_STOPPED

    def _sinks(self, path: Path, stack: ExitStack, *, shown: bool) -> list[Sink]:
        """Open the sinks of step records: a file, with the bytes sent by the hosts, and a progress line."""
        file = JsonLines(path)
        stack.callback(file.close)

        def write(record: Record) -> None:
            if "loss" in record:
                file({**record, _SENT: self.hosts.sent_bytes()})

        shows = [stack.enter_context(ProgressLine(steps=self.steps, done=0))] if shown else []
        return [write, *shows]


def _meter(recipe: TrainConfig) -> StepMeter:
    return StepMeter(
        flops_per_token=recipe.model.flops_per_token, peak_flops=math.inf, phases=Phases(stamps_for("cpu"))
    )


def _computed_s(record: Record) -> float:
    seconds: float = record["step_s"] * (record["forward_share"] + record["backward_share"])
    return seconds


def _check_ended(outcome: JobOutcome) -> None:
    if outcome.code in (EXIT_STOPPED, EXIT_INTERRUPTED):
        raise KeyboardInterrupt
    if outcome.code:
        raise PenstockError(f"A rank on an emulated host failed: {' '.join(outcome.messages)}")
