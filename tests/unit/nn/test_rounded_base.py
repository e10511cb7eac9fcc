"""A frozen base of 8 or 4 bits in training, against float64: it is the network that a merged export has."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from penstock.checkpoint.adapter_run import merged_matrix
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.nn.linear.lora import (
    RoundedProduct,
    adapted_layers,
    adapter_of,
    add_adapter,
    matrix_of,
    round_frozen,
)
from tests.families import small_llama

IDS = torch.arange(66).view(2, 33) % 61


@pytest.fixture(params=["int8", "int4"])
def networks(request):
    """A tuned network over a rounded base, the same in float64, and the float64 network of its export."""
    torch.manual_seed(1)
    plain = Decoder(small_llama(vocab_size=61, hidden_size=80, intermediate_size=108))  # short last groups
    for parameter in plain.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.15)
    config = AdapterConfig(method="lora", rank=4, alpha=8.0, layers=("query", "output", "up", "down"))
    tuned = copy.deepcopy(plain).requires_grad_(False)
    for layer in frozen(tuned, config):
        weight = layer.weight.detach()
        add_adapter(layer, config, dtype=torch.float32)
        round_frozen(layer, request.param)
        layer.multiply.fill(weight)
        nn.init.normal_(layer.lora_a, std=0.1)
        nn.init.normal_(layer.lora_b, std=0.1)
    exact, merged = (copy.deepcopy(plain).double().requires_grad_(False) for _ in range(2))
    for of_plain, of_exact, of_merged, (_, layer) in zip(
        *(frozen(net, config) for net in (plain, exact, merged)), adapted_layers(tuned), strict=True
    ):
        of_exact.weight.copy_(matrix_of(layer).double())
        add_adapter(of_exact, config, dtype=torch.float64)
        of_exact.lora_a.data.copy_(layer.lora_a)
        of_exact.lora_b.data.copy_(layer.lora_b)
        of_merged.weight.copy_(merged_matrix(of_plain.weight.detach(), adapter_of(layer), request.param))
    return tuned, exact, merged


def frozen(model, config):
    """Return the layers that get adapters, in the order of `adapted_layers`."""
    modules = model.named_modules()
    return [layer for name, layer in modules if name.rpartition(".")[2] in config.layers]


def loss_of(model):
    return cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten())


def test_a_rounded_base_trains_the_network_that_is_exported(networks):
    """Where tokens are rounded too the loss differs by 1e-4, and updates by some percent."""
    tuned, exact, merged = networks
    loss, expected = loss_of(tuned), loss_of(exact)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-6)
    assert loss_of(merged).item() == pytest.approx(expected.item(), rel=2e-6)
    loss.backward()
    expected.backward()
    learned = [name for name, parameter in exact.named_parameters() if parameter.requires_grad]
    assert len(learned) == 2 * len(list(adapted_layers(exact)))
    for name in learned:
        found, wanted = tuned.get_parameter(name).grad.double(), exact.get_parameter(name).grad
        assert (found - wanted).norm() < 1e-5 * wanted.norm(), name


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
@pytest.mark.parametrize("base", ["int8", "int4"])
@pytest.mark.parametrize(("outputs", "inputs", "tokens"), [(48, 112, 200), (320, 96, 40)])
def test_a_compiled_product_keeps_no_matrix_for_the_backward_pass(base, outputs, inputs, tokens):
    """What is kept of a layer is what its backward pass needs of the tokens, not a matrix written out."""
    torch.manual_seed(0)
    product = RoundedProduct(torch.empty(outputs, inputs, dtype=torch.float16, device="meta"), base)
    product.fill(torch.randn(outputs, inputs, dtype=torch.float16) / 8)  # a dtype without C++ operators
    assert not product.layer.is_native

    def step(x):
        return torch.tanh(product(x, None)).float().square().sum()

    x = torch.randn(tokens, inputs, dtype=torch.float16, requires_grad=True)
    expected, (slope,) = step(x), torch.autograd.grad(step(x), x)
    loss = torch.compile(step, backend="aot_eager_decomp_partition", fullgraph=True)(x)
    kept = [tuple(tensor.shape) for tensor in loss.grad_fn.saved_tensors]
    assert (outputs, inputs) not in kept, kept
    assert (inputs, outputs) not in kept, kept
    assert torch.equal(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, x)[0], slope, rtol=2e-3, atol=2e-3)
