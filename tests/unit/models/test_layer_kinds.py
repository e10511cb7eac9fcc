"""Networks whose layers lack attention or feed-forward: every path, and every sum over layers."""

from dataclasses import replace

import pytest
import torch
from tests.compiled_cases import BLOCK_SIZE, MAX_BLOCKS, MAX_SEQUENCES, logits_of
from tests.counted_flops import counted_flops
from tests.families import mixed, small_families
from tests.unit.engine.model_runner.test_fuse import TOKENS, in_pages
from torch import nn

from penstock.engine.model_runner.adapted_linear import sites_of
from penstock.engine.model_runner.compiled_steps import CompiledSteps
from penstock.engine.model_runner.graph_plan import plan_graphs
from penstock.engine.model_runner.kv_cache import PagedCache
from penstock.engine.model_runner.native_decoder import open_native_decoder
from penstock.engine.model_runner.serving_layers import FusedBlock, fuse, prepare
from penstock.engine.scheduling.groups import cache_groups, rows_of
from penstock.models.decoder.model import Decoder
from penstock.nn import native
from penstock.parallel.ethernet.breadth_first import take_micro_batches
from penstock.plan.decode import DecodeJob, device_bytes
from penstock.train.recipe.tune_config import TuneConfig

PARTS = ("mlp", "both", "attention", "both")
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": MAX_BLOCKS * BLOCK_SIZE,
}
FAMILIES = small_families(**SIZES)
IDS = torch.arange(TOKENS)[None] * 7 % 50
needs_operators = pytest.mark.skipif(not native.is_available(), reason="no C++ compiler here")


@torch.no_grad()
def pair(name: str) -> tuple[Decoder, Decoder]:
    """Return a network with all parts, where some write 0 to the residual stream, and one without them."""
    torch.manual_seed(3)
    whole, some = Decoder(FAMILIES[name]).eval(), Decoder(mixed(FAMILIES[name], *PARTS)).eval()
    for parameter in whole.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    for index, part in ((0, "attention.output"), (2, "mlp.down")):
        for parameter in whole.layers[index].get_submodule(part).parameters():
            parameter.zero_()
    parameters = dict(whole.named_parameters())
    for own, parameter in some.named_parameters():
        parameter.copy_(parameters[own])
    return whole, some


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_without_a_part_adds_nothing_for_it(name):
    whole, some = pair(name)
    torch.testing.assert_close(some(IDS), whole(IDS), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["smollm3", "qwen2"])
def test_several_micro_batches_go_through_such_blocks_as_one_does(name):
    _, model = pair(name)
    expected = model(IDS)
    take_micro_batches(model, [])
    found = model((IDS, IDS), position_ids=(torch.arange(TOKENS)[None],) * 2, cu_seqlens=(None, None))
    torch.testing.assert_close(found, torch.cat([expected, expected]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("weights", [None, pytest.param("stored", marks=needs_operators)])
@torch.no_grad()
def test_served_from_pages_only_whole_blocks_are_fused_and_the_logits_stay(name, weights):
    _, model = pair(name)
    expected = model(IDS)
    fuse(model)
    if weights is not None:
        prepare(model, weights)
        fused = [isinstance(block, FusedBlock) and block.operands_now() is not None for block in model.layers]
        assert fused == [parts == "both" for parts in PARTS]
    scale = float(expected.abs().max())  # float32 in another order
    torch.testing.assert_close(in_pages(model, IDS), expected, rtol=1e-4, atol=1e-4 * scale)


def cache_of(model: Decoder) -> PagedCache:
    config = model.config
    groups = cache_groups(config.windows, context=config.context)
    return PagedCache(
        rows_of(groups),
        num_blocks=MAX_SEQUENCES * MAX_BLOCKS + 1,
        block_size=BLOCK_SIZE,
        kv_heads=config.key_value_heads,
        head_dim=config.size_of_head,
        dtype=torch.float32,
        device=torch.device("cpu"),
        groups=[group.layers for group in groups],
    )


@needs_operators
@torch.no_grad()
def test_the_cache_has_a_row_for_each_layer_with_attention_and_each_kind_has_a_program():
    _, model = pair("llama")
    fuse(model)
    prepare(model, "stored")
    cache = cache_of(model)
    assert len(cache.pages) == 3
    assert open_native_decoder(model, cache) is None, "whole steps are for networks of whole blocks"
    expected = logits_of(model, cache)
    programs = []

    def counting(graph, _):
        programs.append(graph)
        return graph.forward

    compiled = CompiledSteps(model, cache_of(model), sizes=[1, 2, 3, 4, 8, 16, 20], backend=counting)
    compiled.compile_all()
    assert len(compiled.ready) == 7
    assert len(programs) == 7 * len(set(PARTS))
    for own, other in zip(logits_of(model, cache_of(model), compiled), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_linear_layers_and_stored_tensors_are_those_of_the_network(name):
    config = mixed(FAMILIES[name], *PARTS)
    with torch.device("meta"):
        model = Decoder(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(config.parameter_shapes.items()) == list(shapes.items())
    assert config.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert list(config.stored_rows) == list(shapes)
    layers = {
        f"layers.{path}": (module.out_features, module.in_features)
        for path, module in model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert list(config.linear_layers.items()) == list(layers.items())
    assert {part for site in sites_of(model) for part in site.parts} == set(layers)
    tune = TuneConfig(method="lora", rank=2, layers=("attention",), layers_to_transform=(2,))
    assert tune.adapter_of(config).layers == ("query", "key", "value", "output")
    without = replace(tune, layers_to_transform=(0,))
    assert without.adapter_of(config).layers == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_flops_and_cache_bytes_are_sums_over_layers(name):
    config = mixed(FAMILIES[name], *PARTS)
    with torch.device("meta"):
        model = Decoder(config)
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert 3 * counted_flops(model, 20) == 20 * (config.flops_per_token(20) - 6 * vectors)
    seen = [min(20, window or 20) for window in config.windows]
    assert len(seen) == 3
    held = [device_bytes(DecodeJob(model=config, context_tokens=20, batch=batch)) for batch in (1, 2)]
    assert held[1] - held[0] == sum(seen) * 2 * config.key_value_heads * config.size_of_head * 2


def test_graphs_have_the_operators_of_the_parts_and_the_activations_of_the_largest_block():
    plans = {
        parts: plan_graphs(
            mixed(FAMILIES["llama"], *parts), max_sequences=2, context=32, block_size=BLOCK_SIZE
        )
        for parts in (("both",), PARTS, ("attention",))
    }
    whole, some, fewest = plans.values()
    assert whole.seconds == pytest.approx(2 * len(whole.sizes) * 4 * 1.98 / 18 / 32, rel=0.02), "as measured"
    assert some.seconds == pytest.approx(whole.seconds * 6 / 8)
    assert some.step_bytes == whole.step_bytes > fewest.step_bytes
    assert fewest.seconds == pytest.approx(whole.seconds / 2)


def test_initial_matrices_are_smaller_the_more_parts_write_to_the_residual_stream():
    whole, some = pair("llama")
    name = "layers.1.mlp.down.weight"
    assert some.initial_std(name) == pytest.approx(whole.initial_std(name) * (8 / 6) ** 0.5)
