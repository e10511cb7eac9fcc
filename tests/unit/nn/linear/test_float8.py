"""Products of 8-bit numbers: the rounding against its definition, the layer against its own arithmetic."""

import math

import pytest
import torch
from torch import Tensor, nn

from penstock.nn.linear.float8 import (
    RECIPES,
    ROW,
    WHOLE,
    Float8TrainingLinear,
    Multiply,
    Recipe,
    find_scales_at_once,
    has_native,
    product,
    scaled,
    tiled,
)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(group: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a group by the definition: the least power of two that brings it into range, then the cast."""
    largest = group.abs().max().item()
    scale = 2.0 ** max(-126, math.ceil(math.log2(largest / torch.finfo(dtype).max)) if largest else -126)
    return (group.double() / scale).float().to(dtype).double() * scale


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("groups", "columns"), [(WHOLE, 70), (ROW, 70), (32, 70), (32, 64), (32, 20)])
def test_numbers_are_rounded_by_the_scale_of_their_group(
    dtype: torch.dtype, groups: int, columns: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, columns) * torch.logspace(-4, 4, 5).unsqueeze(1)
    x[2] = 0
    found = scaled(x, groups, dtype).values(torch.float32).double()
    if groups == WHOLE:
        expected = rounded(x, dtype)
    else:
        cuts = range(0, columns, columns if groups == ROW else groups)
        size = columns if groups == ROW else groups
        rows = [torch.cat([rounded(row[at : at + size], dtype) for at in cuts]) for row in x]
        expected = torch.stack(rows)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("largest", [448.0, 448.0 * (1 + 2**-20), 1.75, 1.0, 2.0**-130])
def test_the_largest_number_of_a_group_is_never_cut(largest: float) -> None:
    x = torch.tensor([[largest, -largest / 3, 0.0]])
    found = scaled(x, ROW, E4M3).values(torch.float32)
    torch.testing.assert_close(found, x, rtol=2**-4, atol=2**-130)


@pytest.mark.parametrize("groups", [WHOLE, ROW, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_rounded_once_keeps_its_values(groups: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    once = scaled(torch.randn(8, 96), groups, E4M3).values(dtype)
    assert torch.equal(scaled(once, groups, E4M3).values(dtype), once)


def test_codes_are_row_major_also_of_a_transposed_matrix() -> None:
    """Instructions of GPUs take no others; those of CPUs do."""
    for groups in (WHOLE, ROW, 32):
        assert scaled(torch.randn(64, 32).t(), groups, torch.float8_e4m3fn).codes.is_contiguous()


def test_numbers_that_are_not_finite_are_not_hidden() -> None:
    x = torch.tensor([[1.0, float("inf")], [1.0, float("nan")], [1.0, 2.0]])
    found = scaled(x, ROW, E4M3).values(torch.float32).isfinite().all(1)
    assert found.tolist() == [False, False, True]


@pytest.mark.parametrize("groups", [WHOLE, ROW])
@pytest.mark.parametrize("left", [E4M3, E5M2])
@pytest.mark.parametrize("fast", [False, True])
def test_instructions_of_the_device_and_emulation_multiply_alike(
    groups: int, left: torch.dtype, fast: bool
) -> None:
    """torch's own float8 product, which has a CPU kernel; 1e-2: both round their result to bfloat16."""
    torch.manual_seed(0)
    a = scaled(torch.randn(32, 48), groups, left)
    b = scaled(torch.randn(64, 48), groups, E4M3)
    native = product(a, b, torch.bfloat16, native=True, fast=fast)
    torch.testing.assert_close(native, product(a, b, torch.bfloat16, native=False), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (128, 4), (200, 6), (256, 9)])
def test_exponents_of_blocks_lie_where_the_instructions_read_them(rows: int, blocks: int) -> None:
    """The offset of each is that of the formula in the documentation of cuBLAS; the rest is zero."""
    exponents = torch.randint(1, 254, (rows, blocks), dtype=torch.uint8)
    found = tiled(exponents)
    down, across = -(-rows // 128), -(-blocks // 4)
    expected = torch.zeros(down * across * 512, dtype=torch.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * across + block // 4
            within = row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            expected[tile * 512 + within] = exponents[row, block]
    assert found.equal(expected)


def test_products_of_blocks_are_asked_for_as_torch_wants_them() -> None:
    """No CPU has the kernel; torch checks types, sizes and order of scales without data too."""
    with torch.device("meta"):
        a, b = (scaled(torch.empty(rows, 96), 32, E4M3) for rows in (160, 64))
    out = product(a, b, torch.bfloat16, native=True)
    assert (out.shape, out.dtype, out.device.type) == ((160, 64), torch.bfloat16, "meta")
    a.exponents.resize_(160, 5)
    with pytest.raises(RuntimeError, match="for MX scaling"):
        product(a, b, torch.bfloat16, native=True)


@pytest.mark.parametrize("shape", [(30, 48, 64), (32, 40, 64), (32, 48, 63)])
def test_shapes_that_the_instructions_do_not_take_are_emulated(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = (scaled(torch.randn(rows, k), ROW, E4M3) for rows in (m, n))
    assert product(a, b, torch.bfloat16, native=True).shape == (m, n)


@pytest.mark.parametrize("name", RECIPES)
def test_the_three_products_of_a_layer_are_those_of_rounded_matrices(name: str) -> None:
    """In float64 with the rounding of `scaled`, whose own definition is tested above."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    x, weight, bias, g = torch.randn(6, 8, 64), torch.randn(32, 64), torch.randn(32), torch.randn(6, 8, 32)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    out = Multiply(recipe, native=False)(x, weight, bias)
    out.backward(g)

    def q(matrix: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
        return scaled(matrix.detach(), recipe.groups, dtype).values(torch.float32).double()

    flat_x, flat_g = x.flatten(0, 1), g.flatten(0, 1)
    read = q(weight).float()
    expected = (q(flat_x) @ q(weight).t()).view(out.shape) + bias.double()
    of_x = (q(flat_g, recipe.gradient) @ q(read.t()).t()).view(x.shape)
    of_weight = q(flat_g.t(), recipe.gradient) @ q(flat_x.t()).t()
    for found, wanted in (
        (out, expected),
        (x.grad, of_x),
        (weight.grad, of_weight),
        (bias.grad, flat_g.double().sum(0)),
    ):
        assert found is not None
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_rowwise"])
def test_a_layer_and_its_gradients_by_instructions_are_those_of_emulation(name: str) -> None:
    """torch has these products for CPUs too; 1e-2: both round their results to bfloat16."""
    torch.manual_seed(0)
    x, weight, g = (torch.randn(*shape).bfloat16() for shape in ((64, 96), (48, 96), (64, 48)))
    found = []
    for native in (True, False):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out = Multiply(RECIPES[name], native)(*inputs)
        found.append((out, *torch.autograd.grad(out, inputs, g)))
    for ours, emulated in zip(*found, strict=True):
        torch.testing.assert_close(ours, emulated, rtol=1e-2, atol=5e-2)


@pytest.mark.parametrize("name", RECIPES)
def test_small_matrices_do_not_pay(name: str) -> None:
    """Keys and values of 1B and 8B models do not, the large matrices of an 8B model do."""
    recipe = RECIPES[name]
    assert not recipe.pays(outputs=512, inputs=2048)
    assert not recipe.pays(outputs=1024, inputs=4096)
    for outputs, inputs in ((4096, 4096), (14336, 4096), (4096, 14336)):
        assert recipe.pays(outputs=outputs, inputs=inputs)


@pytest.mark.parametrize("name", RECIPES)
def test_rounding_to_8_bits_costs_a_few_percent_of_a_random_product(name: str) -> None:
    """Three bits of mantissa: 2**-4 at most for a number, and errors partly cancel in a sum."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    eight = Float8TrainingLinear(64, 48)
    eight.load_state_dict(layer.state_dict())
    eight.multiply = Multiply(RECIPES[name], native=False)
    x = torch.randn(32, 64)
    error = (eight(x) - layer(x)).norm() / layer(x).norm()
    assert 0.005 < error < 0.05


def test_no_instructions_are_taken_for_granted_on_a_cpu() -> None:
    assert not any(has_native(recipe, "cpu") for recipe in RECIPES.values())
    assert not has_native(Recipe(32, E4M3, None), "cuda")


def test_blocks_that_do_not_fill_a_row_are_emulated() -> None:
    a, b = (scaled(torch.randn(rows, 48), 32, E4M3) for rows in (16, 32))
    assert product(a, b, torch.bfloat16, native=True).equal(product(a, b, torch.bfloat16, native=False))


# torch 2.13's own tracing of an autograd.Function makes an instance of it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_compiles_without_a_graph_break(name: str) -> None:
    layer = Float8TrainingLinear(64, 32)
    layer.multiply = Multiply(RECIPES[name], native=False)
    x = torch.randn(4, 8, 64, requires_grad=True)
    g = torch.randn(4, 8, 32)
    plain = layer(x)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(compiled, plain)
    inputs = (x, layer.weight, layer.bias)
    for found, expected in zip(
        torch.autograd.grad(compiled, inputs, g), torch.autograd.grad(plain, inputs, g), strict=True
    ):
        assert torch.equal(found, expected)


class Layers(nn.Sequential):
    """A block of three float8 layers."""

    def __init__(self, name: str) -> None:
        super().__init__(*(Float8TrainingLinear(*size) for size in ((64, 32), (32, 48), (48, 16))))
        for layer in self:
            layer.multiply = Multiply(RECIPES[name], native=False)
        self.to(torch.bfloat16)


def outputs_and_gradients(block: nn.Module, x: Tensor) -> list[Tensor]:
    out = block(x)
    return [out, *torch.autograd.grad(out, (x, *block.parameters()), torch.ones_like(out))]


# torch 2.13's own tracing of an autograd.Function makes an instance of it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in RECIPES), ("float8_tensorwise", True)]
)
def test_scales_found_at_once_change_no_bit(name: str, compiled: bool) -> None:
    block = Layers(name)
    with torch.no_grad():
        block[0].weight[3, 5] = 300.0  # a scale of its own, and a negative number that is the largest
        block[1].weight[7, 1] = -7.5
        block[2].weight.zero_()
    x = torch.randn(10, 64, dtype=torch.bfloat16, requires_grad=True)
    expected = outputs_and_gradients(block, x)
    find_scales_at_once([block])
    if compiled:
        block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    for one, other in zip(outputs_and_gradients(block, x), expected, strict=True):
        assert one.equal(other)


def test_scales_found_at_once_are_used_and_gone_after_a_pass_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Layers("float8_tensorwise")
    find_scales_at_once([block])
    with pytest.raises(RuntimeError, match="shapes"):
        block(torch.zeros(10, 63, dtype=torch.bfloat16))
    assert [layer.multiply.found for layer in block] == [None, None, None]
    x = torch.randn(10, 64, dtype=torch.bfloat16)
    before = block(x)
    monkeypatch.setattr(torch, "_foreach_norm", lambda weights, _: [torch.tensor(1e9) for _ in weights])
    assert not block(x).equal(before)
