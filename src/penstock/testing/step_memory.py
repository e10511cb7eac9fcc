"""The most bytes that tensors take at one moment of a real training step, on one of its ranks."""

from penstock.data import Loader
from penstock.parallel.mesh import World
from penstock.testing.live_bytes import LiveBytes
from penstock.train.config import TrainConfig
from penstock.train.setup import open_state
from penstock.train.step import Asked, train_step

_STEPS = 2  # the first makes buffers that stay


def peak_of_step(config: TrainConfig, world: World) -> int:
    """Train two steps from the start; return the peak of the second. Every rank must call it.

    Everything is counted that was made since: weights, states of the optimizer, what a step makes; what an
    operator makes and frees inside itself is not seen.
    """
    with LiveBytes() as seen:
        state = open_state(config, world)
        assert isinstance(state.loader, Loader)
        batches = iter(state.loader)
        for _ in range(_STEPS):
            batch = next(batches)
            seen.reset()
            rows = config.data.micro_batch_size or len(batch["labels"])
            train_step(
                state,
                batch,
                world,
                micro_batch_size=rows,
                clip_norm=config.optim.clip_norm,
                asked=Asked(False),
            )
        return seen.peak
