"""Layers merged into one product."""

import pytest
import torch
from torch import nn

from penstock.nn.linear.packed import MergedLinear


def layers(*, biases: tuple[bool, ...]) -> dict[str, nn.Linear]:
    torch.manual_seed(0)
    names = ("query", "key", "value")
    return {
        name: nn.Linear(8, 6 + i, bias=bias) for i, (name, bias) in enumerate(zip(names, biases, strict=True))
    }


@pytest.mark.parametrize("biases", [(False, False, False), (True, False, True)])
def test_one_product_has_the_outputs_of_every_layer(biases):
    parts = layers(biases=biases)
    merged, x = MergedLinear.of(parts), torch.randn(2, 3, 8)
    out = merged(x)
    for part, (name, layer) in zip(merged.split(out), parts.items(), strict=True):
        torch.testing.assert_close(part, layer(x), rtol=1e-6, atol=1e-6)
        assert part.data_ptr() == out[..., merged.rows(name).start :].data_ptr(), "a copy was made"


def test_bias_is_made_only_where_a_layer_has_one():
    assert MergedLinear.of(layers(biases=(False, False, False))).linear.bias is None
    assert MergedLinear.of(layers(biases=(False, True, False))).linear.bias.tolist()[:6] == [0.0] * 6


def test_a_name_that_no_layer_has_is_an_error():
    with pytest.raises(KeyError, match="gate"):
        MergedLinear.of(layers(biases=(False, False, False))).rows("gate")
