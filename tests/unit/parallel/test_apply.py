"""What `parallelise` does to a model's layers, without ranks."""

import torch
from torch import nn

from penstock.nn.linear.float8 import RECIPES, Float8TrainingLinear
from penstock.parallel.apply import multiply_in_8_bits


def test_layers_that_are_too_small_to_gain_stay_as_they_are_where_there_are_instructions() -> None:
    with torch.device("meta"):
        sizes = {"key": (2048, 512), "gate": (2048, 8192)}
        layers = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
        model = nn.ModuleDict({"layers": nn.ModuleList([layers])})
    multiply_in_8_bits(model, RECIPES["float8_rowwise"], native=True)
    assert type(layers["key"]) is nn.Linear
    assert isinstance(layers["gate"], Float8TrainingLinear)
    multiply_in_8_bits(model, RECIPES["float8_rowwise"], native=False)
    assert isinstance(layers["key"], Float8TrainingLinear)
