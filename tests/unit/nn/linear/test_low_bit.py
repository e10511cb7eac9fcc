"""Blocks of 8-bit codes, and rounding at random."""

import pytest
import torch

from penstock.nn.linear.rounding import (
    code_of_zero,
    dynamic_map,
    from_codes,
    num_blocks,
    round_stochastically,
    to_codes,
)


@pytest.mark.parametrize("signed", [True, False])
def test_each_number_becomes_the_nearest_value_of_its_block(signed: bool) -> None:
    """Against the definition in float64; a difference of 1e-7 of the scale is a tie of two neighbours."""
    torch.manual_seed(0)
    values = torch.randn(5, 300) * torch.logspace(-6, 3, 5).unsqueeze(1)
    values = values if signed else values.square()
    codes, scales = to_codes(values, block=128, signed=signed)
    assert scales.shape == (5, num_blocks(300, 128)) == (5, 3)
    found = from_codes(codes, scales, block=128, signed=signed).double()
    levels = torch.tensor(dynamic_map(signed=signed), dtype=torch.float64)
    for row in range(5):
        for block in range(3):
            some = slice(128 * block, 128 * (block + 1))
            exact = values[row, some].double()
            scale = exact.abs().max()
            nearest = (exact.unsqueeze(1) - levels * scale).abs().amin(1)
            assert scales[row, block].item() == pytest.approx(scale.item(), rel=1e-6)
            torch.testing.assert_close(
                (found[row, some] - exact).abs() / scale, nearest / scale, rtol=0, atol=2e-7
            )


@pytest.mark.parametrize("signed", [True, False])
def test_zeros_stay_zeros_and_codes_of_codes_do_not_move(signed: bool) -> None:
    zeros = torch.zeros(2, 130)
    codes, scales = to_codes(zeros, block=128, signed=signed)
    assert codes.unique().tolist() == [code_of_zero(signed=signed)]
    assert torch.equal(from_codes(codes, scales, block=128, signed=signed), zeros)
    values = torch.rand(3, 256)
    once = from_codes(*to_codes(values, block=128, signed=signed), block=128, signed=signed)
    assert once.amax(1).min() > 0.9, "1 is a value of the map, so the largest is kept"


def test_cutting_between_rows_cuts_no_block() -> None:
    values = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    codes, scales = to_codes(values, block=128, signed=True)
    part_codes, part_scales = to_codes(values[2:5], block=128, signed=True)
    assert torch.equal(part_codes, codes[2:5])
    assert torch.equal(part_scales, scales[2:5])


def test_random_rounding_goes_to_a_neighbour_with_the_probability_of_the_distance() -> None:
    """All 2**16 random numbers for one value: the share that goes up is exact."""
    bits = torch.arange(2**16) + (12345 << 16)  # higher bits do not matter
    low = torch.tensor(1.0)
    high = low + 2**-7
    for share in (0.0, 0.25, 0.7001953125):
        value = low + share * (high - low)
        for sign in (1.0, -1.0):
            found = round_stochastically((sign * value).expand(2**16).contiguous(), bits).float()
            assert set(found.tolist()) <= {sign * low.item(), sign * high.item()}
            assert (found.abs() == high).double().mean().item() == pytest.approx(share, abs=2**-16)


def test_random_rounding_leaves_what_is_not_finite() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan")])
    found = round_stochastically(values, torch.full((3,), 0xFFFF))
    assert found[0] == float("inf")
    assert found[1] == float("-inf")
    assert found[2].isnan()
