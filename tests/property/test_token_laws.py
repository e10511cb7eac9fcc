"""The C++ operator and plain torch draw the same token, whatever the row and the settings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampling.filters import choose, choose_plain, probabilities, settings_tensor
from penstock.engine.sampling_params import Sampling
from penstock.nn import native
from tests.sampling_cases import numbers, rows, samplings

pytestmark = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")


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
