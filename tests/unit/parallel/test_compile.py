"""Compiled blocks meet batches of every shape a run can have, and stay within few programs."""

from dataclasses import replace

import pytest
import torch

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.nn.linear.float8 import RECIPES
from penstock.parallel import apply
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig

SHAPE = DecoderConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
)


def built(*, compiled, backend="eager"):
    model = Decoder(SHAPE)
    init_weights(model, seed=0)
    compile_blocks(model, CompileConfig(enabled=compiled), backend=backend)
    return model


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
def test_rows_and_lengths_may_change_many_times_with_and_without_gradients():
    torch.compiler.reset()
    programs = []

    def count(graph, _):
        programs.append(graph)
        return graph.forward

    compiled, plain = built(compiled=True, backend=count), built(compiled=False)
    for step, (rows, length) in enumerate([(2, 8), (4, 8), (4, 12), (1, 16), (3, 10)]):
        ids = torch.arange(rows * length).view(rows, length) % 16
        ends = torch.arange(0, rows * length + 1, length // 2 if step % 2 else length, dtype=torch.int32)
        torch.testing.assert_close(compiled(ids, cu_seqlens=ends), plain(ids, cu_seqlens=ends))
        with torch.no_grad():
            torch.testing.assert_close(compiled(ids, cu_seqlens=ends), plain(ids, cu_seqlens=ends))
    assert len(programs) <= 8


def test_where_it_is_not_enabled_nothing_changes():
    model = built(compiled=False)
    assert all("forward" not in vars(block) for block in model.layers)


def test_names_of_parameters_do_not_change():
    assert list(built(compiled=True).state_dict()) == list(built(compiled=False).state_dict())


def test_blocks_stay_uncompiled_where_the_compiler_fails(monkeypatch):
    asked = CompileConfig(enabled=True, mode="max-autotune-no-cudagraphs")
    assert apply._if_possible(asked, "cpu") is asked
    monkeypatch.setattr(apply, "compiles", lambda _: False)
    assert apply._if_possible(asked, "cpu") == replace(asked, enabled=False)


@pytest.mark.parametrize("name", RECIPES)
def test_on_a_cpu_only_8_bit_products_by_rows_are_compiled(name):
    asked = CompileConfig(enabled=True)
    found = apply._if_possible(asked, "cpu", RECIPES[name])
    assert found == (asked if name == "float8_rowwise" else replace(asked, enabled=False))
