"""No path ignores a switch of a family: each path against the plain network in float64, and on against off.

The plain network equals transformers, family by family (test_family_numbers.py). Training over ranks is in
ranks/test_parallel_layouts.py. check_switches.py compiles and trains each switch by Inductor.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.families import small_llama
from tests.unit.engine.model_runner.test_fuse import in_pages
from tests.unit.engine.model_runner.test_whole_steps import BLOCK_SIZE, a_batch
from torch._inductor import config as inductor

from penstock.core.errors import ConfigError
from penstock.core.rng import key_of
from penstock.engine.model_runner.collectives import RankGroup
from penstock.engine.model_runner.kv_cache import PagedCache
from penstock.engine.model_runner.native_decoder import open_native_decoder
from penstock.engine.model_runner.serving_layers import FusedBlock, fuse, prepare
from penstock.engine.model_runner.tensor_parallel import GatheredLogits, join_ranks
from penstock.models.decoder import config as decoder_config
from penstock.models.decoder.model import Decoder
from penstock.models.decoder.tensor_slices import TensorParallelRank, slice_of, sliced_config
from penstock.models.families import FAMILY
from penstock.models.family.base import NEUTRAL
from penstock.nn import fused
from penstock.nn.init import fill_normal
from penstock.nn.kinds import parameter_kinds
from penstock.nn.linear.packed import can_multiply
from penstock.nn.softcap import capped
from penstock.testing.ranks import on_ranks

SWITCHES = {
    "norms after": {"norm_placement": "post"},
    "norms before and after": {"norm_placement": "sandwich"},
    "norms of heads": {"qk_norm": "head"},
    "norms of all heads": {"qk_norm": "whole"},
    "weights less 1": {"has_zero_centered_norms": True},
    "gelu": {"activation": "gelu_tanh"},
    "squared relu": {"activation": "relu2"},
    "no gate": {"has_gate": False},
    "scaled embeddings": {"scales_embeddings": True},
    "sinks": {"has_sinks": True},
}
SWITCHES["all"] = {key: value for switch in SWITCHES.values() for key, value in switch.items()}
SWITCHES["softcap of scores"] = {"attn_logit_softcapping": 0.1}
SWITCHES["softcap of logits"] = {"final_logit_softcapping": 1.0}
SWITCHES["all others"] = {  # sinks and a softcap of scores exclude each other
    key: value
    for switch in ("norms after", "norms of heads", "gelu", "softcap of scores", "softcap of logits")
    for key, value in SWITCHES[switch].items()
}
TOGETHER = ("all", "all others")
IDS = torch.arange(11)[None] * 7 % 100
needs_operators = pytest.mark.skipif(
    not can_multiply(torch.zeros(1)), reason="this CPU has no such instructions, or no compiler"
)


@contextmanager
def switched(switches):
    """Let the family of Llama have other features, or fields; yield its config."""
    fields = {name: value for name, value in switches.items() if name in NEUTRAL}
    features = {name: value for name, value in switches.items() if name not in NEUTRAL}
    family = replace(FAMILY["llama"], settings=frozenset(fields), **features)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_config, "FAMILY", {"llama": family})
        yield small_llama(vocab_size=100, num_hidden_layers=3, intermediate_size=64, mlp_bias=True, **fields)


@torch.no_grad()
def built(config):
    """Return a network whose weights are functions of their names alone."""
    model = Decoder(config).eval()
    for name, parameter, kind in parameter_kinds(model):
        fill_normal(parameter, key_of(1, "switch", name), std=0.2)
        parameter.add_(0.0 if kind.name == "matrix" else 0.5)
    return model


def plain(model):
    return model(IDS)


def modules(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused.native, "is_available", lambda: False)
        fuse(model)
    return in_pages(model, IDS)


def operators(model):
    fuse(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedBlock, "operands_now", lambda _: None)
        return in_pages(model, IDS)


def blocks(model):
    fuse(model)
    prepare(model, "stored")
    assert all(block.operands_now() is not None for block in model.layers)
    return in_pages(model, IDS)


def whole_steps(model, group=None):
    prepare(model, "stored")
    config = model.config
    cache = PagedCache(
        config.num_hidden_layers,
        num_blocks=11,
        block_size=BLOCK_SIZE,
        kv_heads=config.key_value_heads,
        head_dim=config.size_of_head,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    native = open_native_decoder(model, cache, group)
    assert native is not None
    _, logits = native.run(replace(a_batch([(0, 11)]), adapters=np.full(1, -1, np.int32)))
    return capped(logits, config.final_logit_softcapping)[None]  # as `Adapters.adapted_logits`


def fused_whole_steps(model):
    fuse(model)
    return whole_steps(model)


def compiled(model, backend="aot_eager"):
    torch._dynamo.reset()  # else one case too many for a block's code
    for block in model.layers:
        block.compile(fullgraph=True, backend=backend)
    return model(IDS)


@pytest.fixture
def quick_inductor(monkeypatch):
    """Let Inductor spend no time on what pays only for many programs."""
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # builds no library to see what the CPU has
    with inductor.patch(compile_threads=1, cpp_cache_precompile_headers=False):
        yield


PATHS = {
    "plain": plain,
    "modules": modules,
    "compiled": compiled,
    "operators": pytest.param(operators, marks=needs_operators),
    "blocks": pytest.param(blocks, marks=needs_operators),
    "whole steps": pytest.param(fused_whole_steps, marks=needs_operators),
}


@torch.inference_mode()
def expected_of(name):
    with switched(SWITCHES.get(name, {})) as config:
        return built(config).double()(IDS)


def error(logits, expected):
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_path_computes_a_switch_as_the_plain_network_in_float64(path, name):
    expected = expected_of(name)
    assert error(expected, expected_of("off")) > 0.01
    with torch.no_grad(), switched(SWITCHES[name]) as config:
        assert error(path(built(config)), expected) < 2e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("quick_inductor")
@pytest.mark.parametrize("name", TOGETHER)
def test_inductor_computes_switches_together_as_the_plain_network_in_float64(name):
    with torch.no_grad(), switched(SWITCHES[name]) as config:
        assert error(compiled(built(config), "inductor"), expected_of(name)) < 2e-5


def test_sinks_and_a_softcap_of_scores_exclude_each_other():
    both = switched(SWITCHES["sinks"] | SWITCHES["softcap of scores"])
    with pytest.raises(ConfigError, match=r"together with attention sinks.*Leave it out"), both:
        pass


@torch.no_grad()
def rank_logits(world, *, meeting):
    """Return the logits of each network over two ranks, by modules and in whole steps."""
    place = TensorParallelRank(world.ranks.rank, world.ranks.world_size)
    group = RankGroup(place, world.device)
    group.join(meeting)
    found = {}
    for name, switches in SWITCHES.items():
        with switched(switches) as whole:
            of_all, model = built(whole).state_dict(), Decoder(sliced_config(whole, place)).eval()
            for own, parameter in model.named_parameters():
                cut = slice_of(own, whole, place)
                parameter.copy_(
                    of_all[own] if cut is None else of_all[own].index_select(cut[0], torch.tensor(cut[1]))
                )
            fuse(model)
            join_ranks(model, whole, group)
            logits = GatheredLogits(model, group)(model.hidden(IDS)[0])
            found[name, "modules"] = capped(logits, whole.final_logit_softcapping)
            if can_multiply(torch.zeros(1)):
                found[name, "whole steps"] = whole_steps(model, group)[0]
    dist.barrier()  # who is done first would end connections that others still use
    group.close()
    return found


def test_two_ranks_compute_a_switch_as_the_plain_network_in_float64(tmp_path):
    first, _ = on_ranks(partial(rank_logits, meeting=tmp_path / "meeting"), ranks=2)
    assert len(first) >= len(SWITCHES)
    for (name, path), logits in first.items():
        assert error(logits[None], expected_of(name)) < 2e-5, (name, path)
