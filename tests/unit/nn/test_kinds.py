"""Kinds of parameters: what modules state, and who reads it."""

import pytest
import torch
from torch import nn

from penstock.models.decoder.model import Decoder
from penstock.models.speculator import Speculator, SpeculatorConfig
from penstock.nn.init import init_weights
from penstock.nn.kinds import BIAS, MATRIX, SCALE, ParameterKind, parameter_kinds
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.nn.linear.lora import add_adapter
from penstock.train.optim.optimizer import build_optimizer
from penstock.train.recipe.optim_config import OptimConfig
from tests.families import small_llama


class Odd(nn.Module):
    """A matrix-shaped bias, a vector-shaped matrix and a scale that starts at 3."""

    def __init__(self):
        super().__init__()
        self.table, self.row, self.gain = (
            nn.Parameter(torch.full(shape, 9.0)) for shape in ((2, 3), (4,), (5,))
        )

    def kinds(self):
        return {"table": BIAS, "row": MATRIX, "gain": ParameterKind("vector", 3.0)}


def test_kinds_decide_on_initial_values_decay_and_muon_and_shapes_do_not():
    model = nn.ModuleDict({"layers": Odd()})
    model.initial_std = lambda _: 0.1
    init_weights(model, seed=0)
    odd = model["layers"]
    assert (odd.table == 0).all()
    assert (odd.gain == 3).all()
    assert 0 < odd.row.abs().max() <= 0.3
    optimizer = build_optimizer(model, OptimConfig(rule="muon", weight_decay=0.25))
    groups = {
        name: (group["rule"], group["weight_decay"])
        for group in optimizer.param_groups
        for name, p in odd.named_parameters()
        if any(p is one for one in group["params"])
    }
    assert groups == {"row": ("muon", 0.25), "table": ("adamw", 0.0), "gain": ("adamw", 0.0)}


def test_every_parameter_of_a_network_has_a_kind_in_the_order_of_the_parameters():
    model = Decoder(small_llama(attention_bias=True, tie_word_embeddings=True))
    add_adapter(
        model.layers[0].attention.query,
        AdapterConfig(method="dora", rank=2, alpha=4.0, layers=("query",)),
        dtype=torch.float32,
    )
    found = list(parameter_kinds(model))
    assert [(name, id(p)) for name, p, _ in found] == [(n, id(p)) for n, p in model.named_parameters()]
    kinds = {name: kind for name, _, kind in found}
    assert kinds["layers.0.attention_norm.weight"] == SCALE
    assert kinds["layers.1.attention.query.bias"] == BIAS
    assert kinds["layers.0.attention.query.lora_a"] == MATRIX
    assert kinds["layers.0.attention.query.magnitude"].name == "vector"
    speculator = Speculator(SpeculatorConfig(vocab_size=5, emb_dim=4, inner_dim=3, n_predict=3))
    names = [name for name, *_ in parameter_kinds(speculator)]
    assert names == [name for name, _ in speculator.named_parameters()]  # shared ones once


def test_a_module_that_does_not_state_a_kind_is_named():
    with pytest.raises(TypeError, match=r"LayerNorm does not state the kind of its parameter 1\.weight"):
        list(parameter_kinds(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
