"""A loader's first so many steps, with a length: for frameworks that ask an iterable how long it is.

Lightning reads one batch ahead of an iterable that has no length, to know which is the last, and a state
saved then would be one batch too far. A length keeps it from that.
"""

from collections.abc import Generator
from contextlib import closing
from typing import Any

from penstock.core.errors import ConfigError
from penstock.data.loader import Loader
from penstock.data.state import State


class Steps:
    """Batches of a loader from where it is up to step `steps`, counted from the start of the run.

    The length is that of the whole run, `steps`, wherever the loader is: a framework that resumes in the
    middle knows how much of it is done. State goes to and from the loader.

    Raises:
        ConfigError: fewer than one step.
    """

    def __init__(self, loader: Loader, steps: int) -> None:
        if steps < 1:
            raise ConfigError("steps must be at least 1", got=steps)
        self.loader = loader
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Generator[dict[str, Any]]:  # Any: tensors or arrays, as the loader delivers
        batches = iter(self.loader)
        with closing(batches):
            while self.loader.step < self._steps:
                yield next(batches)

    def state_dict(self) -> State:
        """Return the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Move the loader to a saved state."""
        self.loader.load_state_dict(state)
