"""Linear layers of the blocks in 8 bits; how their weights travel is in encoded_gather.py."""

from torch import nn

from penstock.nn.float8 import RECIPES, Float8Linear, Multiply, has_native
from penstock.parallel.tensor import ColumnLinear, RowLinear


def multiply_in_8_bits(model: nn.Module, recipe: str, *, device: str) -> None:
    """Let the linear layers of the blocks multiply by a recipe, in place; slices of layers too.

    Args:
        recipe: a name in `nn.float8.RECIPES`.
        device: kind of the devices that will compute.
    """
    chosen = RECIPES[recipe]
    multiply = Multiply(chosen, has_native(chosen, device))
    for module in model.get_submodule("layers").modules():
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear
        if isinstance(module, Float8Linear | ColumnLinear | RowLinear):
            module.multiply = multiply
