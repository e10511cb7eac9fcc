"""Transforms that fail in worker processes; a module of its own, so that a worker imports little."""

import os
import signal
import time

import numpy as np

from penstock.data.transform import Sample


def fails_at_nine(sample: Sample, _rng: np.random.Generator) -> Sample:
    if sample.sample_id == 9:
        raise KeyError("no such language")
    return sample


def dies_at_nine(sample: Sample, _rng: np.random.Generator) -> Sample:
    if sample.sample_id == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def takes_for_ever(sample: Sample, _rng: np.random.Generator) -> Sample:
    if sample.sample_id >= 8:
        time.sleep(3600)
    return sample
