"""The C++ operator and plain torch draw the same token, whatever the row and the settings."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampling.filters import choose, choose_plain, probabilities, settings_tensor
from penstock.engine.sampling_params import Sampling
from penstock.nn import native

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")


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


@given(rows(), st.lists(samplings, min_size=5, max_size=5), st.lists(numbers, min_size=5, max_size=5))
def test_the_operator_draws_what_plain_torch_draws(logits, settings, drawn):
    settings, drawn = settings[: len(logits)], drawn[: len(logits)]
    expected = choose_plain(logits, settings_tensor(settings, drawn, vocab=logits.shape[1]))
    assert choose(logits, settings, drawn).tolist() == expected.tolist()


@given(rows(), samplings, numbers)
def test_what_is_drawn_is_possible(logits, sampling, number):
    """In float64 nothing is cut or rounded: a token within 1e-6 of an edge may be on its other side."""
    (token,) = choose(logits[:1], [sampling], [number]).tolist()
    if not logits[0].isfinite().any():
        assert token == -1
        return
    near = Sampling(
        temperature=max(sampling.temperature, 1e-30),
        top_k=sampling.top_k,
        top_p=min(1.0, sampling.top_p + 1e-6),
        min_p=max(0.0, sampling.min_p - 1e-6),
    )
    assert probabilities(logits[0], near)[token] > 0
