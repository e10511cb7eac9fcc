"""Error feedback: what rounding leaves out is sent later, and small gradients among large ones arrive."""

import math

import pytest
import torch

from penstock.parallel.ethernet.codecs import Encoder, decode
from penstock.parallel.ethernet.wire_size import CodecName


def received(encoder: Encoder, x: torch.Tensor) -> torch.Tensor:
    return decode(encoder.encode(x), encoder.codec, size=x.shape[1])


@pytest.mark.parametrize("codec", ["bfloat16", "float8", "int8", "int4"])
def test_the_sum_of_what_arrives_is_that_of_what_was_sent_but_for_one_rounding(codec: CodecName) -> None:
    """By the norm; remainders in bfloat16 add a little each time."""
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(2, 300, generator=generator) for _ in range(50)]
    fed, plain = Encoder(codec, feedback=True), Encoder(codec)
    summed = sum(gradients[1:], gradients[0])
    with_feedback = sum((received(fed, x) for x in gradients), torch.zeros(2, 300)) - summed
    without = sum((received(plain, x) for x in gradients), torch.zeros(2, 300)) - summed
    assert with_feedback.norm() < without.norm() / 3


def distance_left(encoder: Encoder, *, steps: int = 400) -> float:
    """Descend on 127 parabolas, beside noise of 50 in their block; return the worst distance left.

    Their gradients, at most 3, are less than half a step of 50 / 7.
    """
    aim = torch.linspace(1, 3, 128).unsqueeze(0)
    x = torch.zeros(1, 128)
    noise = torch.Generator().manual_seed(0)
    for _ in range(steps):
        gradient = x - aim
        gradient[0, 0] = 50.0 if torch.randint(2, (), generator=noise) else -50.0
        x = x - 0.02 * received(encoder, gradient)
    return (x - aim)[0, 1:].abs().max().item()


def test_with_error_feedback_a_descent_in_four_bits_converges_and_without_it_stands_still() -> None:
    assert distance_left(Encoder("float32")) < 1e-2
    assert distance_left(Encoder("int4")) > 2.9, "nothing arrived"
    assert distance_left(Encoder("int4", feedback=True)) < 0.2, "a step of 50 / 7 moves by 0.14"


@pytest.mark.parametrize("found", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_seen_once_and_leaves_no_remainder(found: float) -> None:
    encoder = Encoder("int8", feedback=True)
    spoiled = torch.ones(1, 200)
    spoiled[0, 3] = found
    assert not received(encoder, spoiled).isfinite().all()
    assert received(encoder, torch.ones(1, 200)).isfinite().all()


def test_rows_sent_in_pieces_have_the_remainders_of_whole_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    whole, pieces = Encoder("int4", feedback=True), Encoder("int4", feedback=True)
    for _ in range(3):
        x = torch.randn(2, 512, generator=generator)
        expected = received(whole, x)
        for where in (slice(0, 256), slice(256, 512)):
            encoded = pieces.encode(x[:, where], where, of=512)
            assert torch.equal(decode(encoded, "int4", size=256), expected[:, where])
