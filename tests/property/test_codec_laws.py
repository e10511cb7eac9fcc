"""Codecs for the wire: how far numbers may move, what they weigh, and that what is not finite stays so."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.parallel.ethernet.codecs import decode, encode
from penstock.parallel.ethernet.wire_size import BLOCK, CodecName, encoded_bytes

STEPS = {"int8": 127, "int4": 7}
SMALLEST_SCALE = 2.0**-126
CODECS: tuple[CodecName, ...] = get_args(CodecName)

rows = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=300),
    elements=st.floats(-(2.0**123), 2.0**123, width=32),
)


def round_trip(x: torch.Tensor, codec: CodecName) -> torch.Tensor:
    return decode(encode(x, codec), codec, size=x.shape[-1])


def block_of_each(x: torch.Tensor) -> torch.Tensor:
    """Return for each number the largest magnitude of its block, in float64."""
    largest = [
        part.abs().amax(-1, keepdim=True).expand_as(part)
        for part in x.double().split(BLOCK, dim=-1)
        if len(part)
    ]
    return torch.cat(largest, dim=-1)


@given(rows, st.sampled_from(CODECS))
def test_what_arrives_has_the_shape_of_what_was_sent_and_weighs_what_was_said(
    array: np.ndarray, codec: CodecName
) -> None:
    x = torch.from_numpy(array)
    encoded = encode(x, codec)
    assert encoded.dtype == torch.uint8
    assert encoded.shape == (*x.shape[:-1], encoded_bytes(x.shape[-1], codec))
    back = decode(encoded, codec, size=x.shape[-1])
    assert back.shape == x.shape
    assert back.dtype == torch.float32


@given(rows.filter(lambda array: array.size > 0), st.sampled_from(["int8", "int4"]))
def test_an_integer_moves_a_number_by_half_a_step_of_its_block_at_most(
    array: np.ndarray, codec: CodecName
) -> None:
    """And by the rounding of a few products in float32."""
    x = torch.from_numpy(array)
    steps = (block_of_each(x) / STEPS[codec]).clamp_min(SMALLEST_SCALE)
    moved = (round_trip(x, codec).double() - x.double()).abs()
    assert (moved <= steps * (0.5 + 1e-4)).all()


@given(rows.filter(lambda array: array.size > 0))
def test_float8_moves_a_number_by_a_sixteenth_of_it_or_a_last_step_of_its_block(array: np.ndarray) -> None:
    """e4m3 has 3 bits of mantissa; below 2**-6 its steps are 2**-9, where the largest is 448."""
    x = torch.from_numpy(array)
    scales = (block_of_each(x) / 448).clamp_min(SMALLEST_SCALE)
    moved = (round_trip(x, "float8").double() - x.double()).abs()
    assert (moved <= torch.maximum(x.double().abs() / 16, scales * 2**-10) * (1 + 1e-4)).all()


@given(rows)
def test_plain_floats_travel_as_torch_rounds_them(array: np.ndarray) -> None:
    x = torch.from_numpy(array)
    assert torch.equal(round_trip(x, "float32"), x)
    assert torch.equal(round_trip(x, "bfloat16"), x.bfloat16().float())


@pytest.mark.parametrize("codec", CODECS)
def test_zeros_stay_zeros(codec: CodecName) -> None:
    assert torch.equal(round_trip(torch.zeros(3, 1000), codec), torch.zeros(3, 1000))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("found", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK, 299])
def test_a_number_that_is_not_finite_is_not_finite_on_arrival_and_spares_other_blocks(
    codec: CodecName, found: float, place: int
) -> None:
    x = torch.linspace(-1, 1, 300)
    x[place] = found
    back = round_trip(x, codec)
    assert not back[place].isfinite()
    away = torch.arange(300) // BLOCK != place // BLOCK
    assert back[away].isfinite().all()


@given(rows.filter(lambda array: array.size > 0), st.sampled_from(CODECS))
def test_rows_that_travel_together_do_not_know_each_other(array: np.ndarray, codec: CodecName) -> None:
    x = torch.from_numpy(array)
    together = round_trip(x, codec).reshape(-1, x.shape[-1])
    for index, row in enumerate(x.reshape(-1, x.shape[-1])):
        assert torch.equal(together[index], round_trip(row, codec))


@pytest.mark.parametrize("codec", ["float8", "int8", "int4"])
def test_numbers_that_were_rounded_once_keep_their_values(codec: CodecName) -> None:
    once = round_trip(torch.randn(1000, generator=torch.Generator().manual_seed(0)), codec)
    torch.testing.assert_close(round_trip(once, codec), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_bfloat16_is_encoded_as_the_same_numbers_in_float32(codec: CodecName) -> None:
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(round_trip(x, codec), round_trip(x.float(), codec))
