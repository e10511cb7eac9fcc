"""Products of 8-bit floats by the device's instructions against the numbers they stand for, and torchao's."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from penstock.nn.linear.float8 import (
    RECIPES,
    ROW,
    Float8TrainingLinear,
    Multiply,
    has_native,
    power_of_two,
    product,
    scaled,
)
from penstock.nn.linear.quantized import Float8Linear

SHAPES = [(16, 64, 32), (48, 352, 80), (1008, 4096, 1040)]
"""Rows, terms of each sum, columns: multiples of 16 and 32, and of nothing larger."""


def recipe_of(name, device):
    """Return the recipe and whether the device has its instructions, or skip."""
    recipe = RECIPES[name]
    is_native = has_native(recipe, device.type)
    if device.type == "cuda" and not is_native:
        needed, found = recipe.native, torch.cuda.get_device_capability(device)
        pytest.skip(
            f"{name} needs compute capability {needed[0]}.{needed[1]}, this GPU has {found[0]}.{found[1]}"
        )
    return recipe, is_native


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", RECIPES)
def test_a_product_is_that_of_its_rounded_numbers(name, shape, device, is_tiny):
    recipe, is_native = recipe_of(name, device)
    rows, terms, columns = (min(size, 352) for size in shape) if is_tiny else shape
    left = torch.randn(rows, terms, device=device) * torch.logspace(-2, 2, rows, device=device)[:, None]
    a = scaled(left, recipe.groups, recipe.gradient)
    b = scaled(torch.randn(columns, terms, device=device), recipe.groups, torch.float8_e4m3fn)
    found = product(a, b, torch.bfloat16, native=is_native).double()
    expected = a.values(torch.float32).double() @ b.values(torch.float32).double().T
    # the result is rounded to 8 bits; sums of e4m3 products keep 14 bits or more on some cards
    error = (found - expected).abs() / expected.abs().amax(1, keepdim=True)
    assert error.max() < 2**-7, f"{error.max():.2g} of a row's largest"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rows_are_rounded_by_triton_as_by_torch(dtype, device, is_tiny):
    pytest.importorskip("triton")
    for num_rows, columns in ((1, 4096), (17, 4112), (64, 80)):
        x = torch.randn(num_rows, 352 if is_tiny else columns, device=device)
        x = (x * torch.logspace(-6, 4, num_rows, device=device)[:, None]).to(dtype)
        codes, scales = torch.ops.penstock.round_rows(x, 16)
        expected = scaled(functional.pad(x, (0, 0, 0, -num_rows % 16)), ROW, torch.float8_e4m3fn)
        assert scales.equal(power_of_two(expected.exponents))
        assert codes.view(torch.uint8).equal(expected.codes.view(torch.uint8))


@pytest.mark.parametrize("num_tokens", [1, 16, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_a_serving_layer_is_near_the_one_it_was_made_of(num_tokens, bias, device):
    _, is_native = recipe_of("float8_rowwise", device)
    layer = nn.Linear(256, 96, bias=bias, device=device, dtype=torch.bfloat16)
    x = torch.randn(num_tokens, 256, device=device, dtype=torch.bfloat16)
    expected = functional.linear(
        x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double()
    )
    found = Float8Linear(layer, is_native=is_native)(x).double()
    assert (found - expected).norm() / expected.norm() < 0.06  # of both factors 3 bits of mantissa are kept


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_and_its_gradients_are_as_near_to_float64_as_rounding_allows(name, device, is_tiny):
    recipe, is_native = recipe_of(name, device)
    found, exact = layer_and_gradients(Multiply(recipe, native=is_native), device, is_tiny)
    for ours, theirs in zip(found, exact, strict=True):
        # of e4m3 3 bits of mantissa, 4% at random; of e5m2, which tensorwise gradients have, 2
        assert (ours.double() - theirs).norm() / theirs.norm() < 0.08


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
@pytest.mark.computes("torch compiles a kernel of torchao's by NVRTC")
def test_errors_are_no_larger_than_those_of_torchao(name, device, is_tiny):
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    recipe, is_native = recipe_of(f"float8_{name}", device)
    found, exact = layer_and_gradients(Multiply(recipe, native=is_native), device, is_tiny)
    config = float8.Float8LinearConfig.from_recipe_name(name)
    if device.type == "cpu":
        config = type(config)(**{**vars(config), "emulate": True})

    def by_torchao(layer):
        return float8.convert_to_float8_training(nn.Sequential(layer), config=config)

    theirs, _ = layer_and_gradients(by_torchao, device, is_tiny)
    for what, ours, other, truth in zip(("result", "x", "weight"), found, theirs, exact, strict=True):
        of_ours, of_other = ((t.double() - truth).norm() / truth.norm() for t in (ours, other))
        assert of_ours < 1.15 * of_other, f"{what}: {of_ours:.3g}, torchao {of_other:.3g}"


def layer_and_gradients(how, device, is_tiny):
    """Return (result, gradient of x, gradient of the weight) of an 8-bit layer, and the same in float64.

    Args:
        how: what our layer multiplies by, or what makes another layer of a linear one.
    """
    torch.manual_seed(1)
    rows, inputs, outputs = (96, 64, 48) if is_tiny else (2048, 1536, 1040)
    layer = nn.Linear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(rows, outputs, device=device, dtype=torch.bfloat16)
    weight = layer.weight
    if isinstance(how, Multiply):
        eight = Float8TrainingLinear(inputs, outputs, bias=False, device=device, dtype=torch.bfloat16)
        eight.load_state_dict(layer.state_dict())
        eight.multiply, weight = how, eight.weight
    else:
        eight = how(layer)
        weight = eight[0].weight
    out = eight(x)
    found = (out, *torch.autograd.grad(out, (x, weight), g))
    x64, w64, g64 = x.detach().double(), layer.weight.detach().double(), g.double()
    return found, (x64 @ w64.T, g64 @ w64, g64.T @ x64)
