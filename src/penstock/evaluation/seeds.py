"""Seeds of global random generators, which tasks may draw from: those of lm-eval; no torch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

SEEDS = {"random_seed": 0, "numpy_seed": 1234, "torch_seed": 1234}
"""As lm-eval names them in its results."""


@contextmanager
def seeded() -> Iterator[None]:
    """Context manager: Python's and numpy's generators have these seeds inside, their old states after."""
    states = random.getstate(), np.random.get_state()
    random.seed(SEEDS["random_seed"])
    np.random.seed(SEEDS["numpy_seed"])
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
