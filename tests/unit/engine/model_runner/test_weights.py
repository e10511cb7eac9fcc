"""Models whose matrices were made ready for serving."""

import weakref

import pytest
import torch
from torch import nn

from penstock.core.errors import ConfigError
from penstock.engine.model_runner import serving_layers
from penstock.engine.model_runner.serving_layers import chosen, convert, fuse, prepare
from penstock.models.decoder.model import Decoder
from penstock.nn.linear import packed as packed_layers
from penstock.nn.linear import quantized
from penstock.nn.linear.packed import MergedLinear
from penstock.nn.linear.quantized import Int4Linear, Int8Linear, multiplies_integers
from tests.families import small_llama


def model(*, tied=False, dtype=torch.float32):
    torch.manual_seed(3)
    config = small_llama(vocab_size=90, hidden_size=64, intermediate_size=96, tie_word_embeddings=tied)
    made = Decoder(config).to(dtype).eval()
    for parameter in made.parameters():  # a spread that shows in the logits
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.15)
    return made


@pytest.fixture(params=["native", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        for module in (packed_layers, quantized):
            monkeypatch.setattr(module, "can_multiply", lambda *_: False)


@torch.inference_mode()
def logits(net, ids):
    return net.logits(net.hidden(ids))


IDS = torch.arange(40).view(2, 20)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_packed_model_computes_what_the_model_does(tied, fused):
    net = model(tied=tied)
    with torch.inference_mode():
        exact = net(IDS)
    if fused:
        fuse(net)
    prepare(net, "stored")
    torch.testing.assert_close(logits(net, IDS), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("weights", "most"), [("int8", 0.05), ("int4", 0.5)])
def test_fewer_bits_change_the_logits_a_little(weights, most):
    net = model()
    with torch.inference_mode():
        exact = net(IDS)
    fuse(net)
    prepare(net, weights)
    error = (logits(net, IDS) - exact).square().mean().sqrt() / exact.std()
    assert 0 < error < most


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("weights", "inner"), [("int8", Int8Linear), ("int4", Int4Linear)])
def test_table_decides_what_each_layer_becomes(weights, inner, tied):
    net = model(tied=tied)
    fuse(net)
    prepare(net, weights)
    merged = net.layers[0].get_submodule("attention.query_key_value")
    assert isinstance(merged, MergedLinear)
    assert [name for name, _ in merged.parts] == ["query", "key", "value"]
    assert isinstance(merged.linear, inner)
    assert isinstance(net.unembed, Int8Linear)
    assert isinstance(net.embed, nn.Embedding)
    assert not [name for name, layer in net.named_modules() if type(layer) is nn.Linear]


@pytest.mark.parametrize(("weights", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_a_model_is_converted_whole(weights, dtype):
    net = model(dtype=torch.float32 if dtype == torch.bfloat16 else torch.bfloat16, tied=True)
    convert(net, weights)
    fuse(net)
    prepare(net, weights)
    assert {t.dtype for t in [*net.parameters(), *net.buffers()] if t.is_floating_point()} == {dtype}
    assert logits(net, IDS).dtype == dtype


def test_other_weights_keep_the_stored_type():
    net = model(dtype=torch.bfloat16)
    convert(net, "int8")
    prepare(net, "int8")
    assert logits(net, IDS).dtype == torch.bfloat16


def test_each_matrix_is_freed_before_the_next_is_made(monkeypatch):
    net, alive = model(), []
    matrices = [weakref.ref(layer.weight) for layer in net.modules() if isinstance(layer, nn.Linear)]
    init = Int8Linear.__init__

    def counting(self, linear, **options):
        alive.append(sum(ref() is not None for ref in matrices))
        init(self, linear, **options)

    monkeypatch.setattr(Int8Linear, "__init__", counting)
    prepare(net, "int8")
    assert alive == list(range(len(matrices), 0, -1))


def test_errors_say_what_to_do():
    with pytest.raises(ConfigError, match=r"no float8 instructions \(got 'cpu'\). Choose int8."):
        prepare(model(), "float8")
    with pytest.raises(ConfigError, match=r"Unknown format of weights \(got 'int7'\)"):
        prepare(model(), "int7")


def test_rounded_activations_are_refused_where_they_gain_nothing(monkeypatch):
    monkeypatch.setattr(serving_layers, "multiplies_integers", lambda: False)
    with pytest.raises(ConfigError, match=r"CPUs with VNNI only \(got 'cpu without it'\). Leave activations"):
        prepare(model(), "int8", "int8")


@pytest.mark.skipif(not multiplies_integers(), reason="this CPU does not multiply integers")
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_activations_are_rounded_only_when_asked(weights):
    nets = [model(), model()]
    for net, activations in zip(nets, ["stored", "int8"], strict=True):
        prepare(net, weights, activations)
    exact, rounded = (logits(net, IDS) for net in nets)
    plain = model()
    for name, layer in nets[0].named_modules():
        if isinstance(layer, Int8Linear | Int4Linear):
            plain.get_submodule(name).weight.data.copy_(layer.matrix())
    expected = logits(plain.double(), IDS).float()
    torch.testing.assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    difference = (rounded - expected).norm() / expected.norm()
    assert 1e-3 < difference < 0.05


@pytest.mark.parametrize(
    ("flags", "operators", "dtype", "expected"),
    [
        ("avx2", True, torch.float32, ("stored", "int8")),
        ("avx2", True, torch.bfloat16, ("stored", "int8")),
        ("avx2", True, torch.float16, ("float32", "int8")),
        ("avx512f avx512_bf16", True, torch.float32, ("bfloat16", "int8")),
        ("avx512f avx512_bf16", False, torch.float32, ("bfloat16", "stored")),
        ("avx2", False, torch.bfloat16, ("float32", "stored")),
    ],
)
def test_auto_picks_what_is_fastest_here(monkeypatch, flags, operators, dtype, expected):
    """As `benchmarks/matrices.py` measured with these flags."""
    monkeypatch.setattr(serving_layers.env, "cpu_features", lambda: f"flags : {flags}")
    monkeypatch.setattr(serving_layers.native, "is_available", lambda: operators)
    assert chosen("auto", torch.zeros((), dtype=dtype)) == expected
    assert chosen("int4", torch.zeros((), dtype=dtype)) == ("int4", "int4")
    on_gpu = torch.zeros((), dtype=dtype, device="meta")  # any device but a CPU
    assert chosen("auto", on_gpu) == ("bfloat16" if dtype == torch.float32 else "stored", "stored")
