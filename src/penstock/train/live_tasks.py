"""Tasks of lm-eval during training: asked of the live weights every so many steps, on the first rank.

Training is not touched (see live_engine.py), and the same questions with the same examples are asked each
time. An evaluation that fails is logged and recorded, and training goes on.
"""

from pathlib import Path
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError
from penstock.core.log import EventLog
from penstock.evaluation.evaluate import evaluate
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.tables import scores_of
from penstock.evaluation.tasks import TaskDict, load_tasks
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World, broadcast
from penstock.train.live_engine import LiveEngineFailed, live_engine, signs_of_life
from penstock.train.recipe.config import TrainConfig
from penstock.train.state import TrainState

log = EventLog(__name__)

_MAX_SEQUENCES = 64


class LiveTasks:
    """The tasks of a recipe; every rank has one, and the first rank loads them.

    Raises:
        UsageError: on all ranks, if a task cannot be loaded.
        PackageMissing: likewise, lm-eval is not installed.
    """

    def __init__(self, config: TrainConfig, world: World) -> None:
        wanted = config.evaluate
        self._options = EvaluationOptions(
            shots=wanted.shots, limit=wanted.limit, chat_template=wanted.chat_template, bootstrap=0
        )
        self._tasks: TaskDict = {}
        why = ""
        if world.is_first:
            try:
                self._tasks = load_tasks(wanted.tasks, self._options)
            except PenstockError as error:
                why = str(error)
        if why := broadcast(world, why):
            raise UsageError(f"evaluate.tasks: {why}")

    def record(self, state: TrainState, config: TrainConfig, world: World) -> Record:
        """Evaluate the run's weights; return the record of it, or of its failure. Every rank must call it."""
        began = clock.monotonic()
        found: dict[str, Any] = {}
        try:
            with (
                live_engine(state, config, world, max_sequences=_MAX_SEQUENCES) as llm,
                signs_of_life(state, world, "evaluation") as progress,
            ):
                if llm is not None:
                    found = evaluate(
                        llm,
                        self._tasks,
                        self._options,
                        name=str(Path(config.run.dir)),
                        on_progress=progress,
                    )
        except LiveEngineFailed as error:
            if world.is_first:
                log.warning(
                    "evaluation_failed",
                    "The evaluation of step {step:,} failed: {error}",
                    step=state.step,
                    error=error,
                )
            return {"event": "evaluation_failed", "step": state.step, "why": str(error)}
        if not found:
            return {}
        scores = scores_of(found)
        shown = ", ".join(f"{name} {value:.4f}" for name, (value, _) in scores.items())
        log.info("evaluated", "Evaluated step {step:,}: {scores}", step=state.step, scores=shown)
        return {
            "event": "evaluation",
            "step": state.step,
            "evaluation_s": clock.monotonic() - began,
            "task_scores": {name: value for name, (value, _) in scores.items()},
            "task_stderrs": {name: error for name, (_, error) in scores.items() if error is not None},
        }
