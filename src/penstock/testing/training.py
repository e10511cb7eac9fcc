"""Training in a test: a run's loop as one of its ranks, returning its records."""

from penstock.obs.meter import StepMeter
from penstock.obs.sinks import Record
from penstock.parallel.mesh import World
from penstock.train.loop import train
from penstock.train.recipe.config import TrainConfig
from penstock.train.state import TrainState


def records_of(
    state: TrainState, config: TrainConfig, world: World, *, stop_at: int | None = None
) -> list[Record]:
    """Train from a run's present state; return its records. Every rank must call it.

    Args:
        stop_at: step after which the run is asked to stop and save; None: it runs to its end.
    """
    records: list[Record] = []
    train(
        state,
        config,
        world,
        meter=StepMeter(flops_per_token=lambda _: 1, peak_flops=1),
        stop_requested=lambda: stop_at is not None and state.step >= stop_at,
        sinks=[records.append],
        on_batch=lambda *_: None,
    )
    return records
