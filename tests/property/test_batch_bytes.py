"""A batch that is sent as bytes arrives as it was."""

from dataclasses import fields

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from penstock.engine.model_runner.batch import StepBatch, decode, encode

INT64 = {"token_ids", "positions", "slots", "logit_rows"}
NAMES = [field.name for field in fields(StepBatch)]


@st.composite
def batches(draw):
    def array(name):
        shape = [draw(SIZES) for _ in range({"slots": 2, "block_tables": 3}.get(name, 1))]
        return draw(arrays(np.int64 if name in INT64 else np.int32, shape))

    return StepBatch(**{name: array(name) for name in NAMES})


SIZES = st.integers(0, 5)


@given(batches())
def test_decoding_returns_what_was_encoded(batch):
    received = decode(bytearray(encode(batch)))
    for name in NAMES:
        sent, got = getattr(batch, name), getattr(received, name)
        assert (sent.dtype, sent.shape) == (got.dtype, got.shape)
        np.testing.assert_array_equal(sent, got)
        assert got.flags.writeable  # torch warns of others
