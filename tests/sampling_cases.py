"""Logits, settings and random numbers of sampling, for property tests."""

import numpy as np
import torch
from hypothesis import strategies as st

from penstock.engine.sampling_params import Sampling


@st.composite
def rows(draw):
    """Return logits of several rows: flat or steep, with ties and excluded tokens, in two types."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocab = draw(st.sampled_from([1, 2, 7, 64, 100, 513, 3000]))
    found = rng.standard_normal((draw(st.integers(1, 5)), vocab)) * draw(
        st.sampled_from([0.0, 0.01, 1, 3, 30])
    )
    if draw(st.booleans()):
        found = found.round(draw(st.integers(0, 1)))
    if draw(st.booleans()):
        found[:, rng.random(vocab) < draw(st.floats(0, 1))] = -np.inf
    logits = torch.from_numpy(found).float()
    return logits.bfloat16() if draw(st.booleans()) else logits


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-300, 0.01, 0.7, 1.0, 2.0, 1e300]),
    top_k=st.none() | st.integers(1, 4000),
    top_p=st.sampled_from([1e-9, 0.5, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 1.0]),
)
numbers = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.5, 1 - 2**-53])
