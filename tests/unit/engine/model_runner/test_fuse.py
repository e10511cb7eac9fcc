"""A model with the layers of serving computes what the model of training does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.engine.model_runner.kv_cache import BoundCache
from penstock.engine.model_runner.serving_layers import FusedBlock, fuse, prepare
from penstock.models.decoder.model import Decoder
from penstock.nn import fused
from penstock.nn.kernels.paged import LayerPages
from penstock.nn.kernels.pages import PagedStep
from penstock.nn.linear.packed import can_multiply
from tests.families import small_families

CONFIGS = small_families(
    vocab_size=100,
    hidden_size=48,
    intermediate_size=70,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
)
TOKENS = 11
PANELS = {"int8": torch.int8, "int4": torch.uint8}


class Doubled(torch.nn.Module):
    """Wraps a layer as adapters and sums over ranks do."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return 2 * self.linear(x)

    def split(self, out):
        return self.linear.split(out)


@pytest.fixture(params=["operators", "plain"])
def way(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(fused.native, "is_available", lambda: False)
    elif not fused.native.is_available():
        pytest.skip("no C++ compiler here")


def a_model(name, *, dtype=torch.float32, **changes):
    torch.manual_seed(0)
    model = Decoder(replace(CONFIGS[name], **changes)).to(dtype).eval()
    for parameter in model.parameters():  # norms and biases that change something
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    return model


def in_pages(model, ids):
    """Compute a prompt in two steps over pages, in blocks of 4 that are not in order."""
    config, blocks = model.config, np.array([[5, 0, 3]], dtype=np.int32)
    shape = (7, config.key_value_heads, 4, config.size_of_head)
    pages = [torch.zeros(2, *shape, dtype=model.embed.weight.dtype) for _ in config.attentions]
    out = []
    for first, past in ((0, 7), (7, TOKENS)):
        positions = np.arange(first, past)
        step = PagedStep.from_arrays(
            slots=blocks[0, positions // 4].astype(np.int64) * 4 + positions % 4,
            query_starts=np.array([0, past - first], dtype=np.int32),
            lengths=np.array([past], dtype=np.int32),
            block_tables=blocks,
            device=torch.device("cpu"),
        )
        cache = BoundCache([LayerPages(keys, values, step) for keys, values in pages])
        hidden = model.hidden(ids[:, first:past], position_ids=torch.from_numpy(positions)[None], cache=cache)
        out.append(model.logits(hidden))
    return torch.cat(out, dim=1)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_logits_are_those_of_the_model_of_training(name):
    model = a_model(name)
    ids = torch.randint(100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    expected = model(ids)
    fuse(model)
    # float32 in another order; three layers of weights of 0.2 on 48 inputs
    tolerance = {"rtol": 1e-4, "atol": 1e-4 * float(expected.abs().max())}
    torch.testing.assert_close(model(ids), expected, **tolerance)
    torch.testing.assert_close(in_pages(model, ids), expected, **tolerance)


@pytest.mark.usefixtures("way")
@torch.no_grad()
def test_in_bfloat16_logits_stay_as_near_to_float32_as_the_plain_models():
    exact, plain, model = (
        a_model("qwen3"),
        a_model("qwen3", dtype=torch.bfloat16),
        a_model("qwen3", dtype=torch.bfloat16),
    )
    ids = torch.randint(100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    fuse(model)
    expected = exact(ids)
    theirs = (plain(ids).float() - expected).pow(2).mean()
    ours = (in_pages(model, ids).float() - expected).pow(2).mean()
    assert ours < 2 * theirs


def test_merged_products_hold_the_parts_by_name():
    model = a_model("llama")
    query = model.layers[0].attention.query.weight.detach().clone()
    fuse(model)
    merged = model.layers[0].attention.query_key_value
    assert torch.equal(merged.linear.weight[list(merged.rows("query"))], query)
    assert [name for name, _ in model.layers[0].mlp.gate_up.parts] == ["gate", "up"]


def one_by_one(monkeypatch, model, ids):
    with monkeypatch.context() as patch:
        patch.setattr(FusedBlock, "operands_now", lambda _: None)
        return in_pages(model, ids)


@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_block_in_one_call_computes_what_its_modules_do_one_by_one(name, weights, dtype, monkeypatch):
    if not can_multiply(torch.zeros(1)):
        pytest.skip("this CPU has no such instructions, or no compiler")
    model = a_model(name, dtype=dtype, hidden_size=96, intermediate_size=64)
    ids = torch.randint(100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    fuse(model)
    prepare(model, weights)
    whole = in_pages(model, ids)
    operands = [block._operands for block in model.layers]
    assert all(one is not None for one in operands)
    assert {x.dtype for x in operands[0].linears[::4]} == {PANELS.get(weights, dtype)}
    assert torch.equal(whole, one_by_one(monkeypatch, model, ids))


@torch.inference_mode()
def test_a_layer_that_something_wraps_is_called():
    model = a_model("llama")
    ids = torch.randint(100, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    fuse(model)
    prepare(model, "stored")
    before = in_pages(model, ids)
    for owner, name in ((model.layers[1].attention, "output"), (model.layers[1].mlp, "gate_up")):
        plain = getattr(owner, name)
        setattr(owner, name, Doubled(plain))
        assert not torch.allclose(in_pages(model, ids), before, rtol=0.01)
        setattr(owner, name, plain)
        assert torch.equal(in_pages(model, ids), before)
