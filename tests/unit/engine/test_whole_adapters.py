"""Adapters in steps of the whole network in one call, against the same adapters around the layers."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from penstock.engine.model_runner.native_decoder import adapter_panels
from penstock.models.decoder.model import Decoder
from penstock.nn.linear.packed import can_multiply
from tests.loras import save_lora
from tests.unit.engine.model_runner.test_whole_steps import CONFIGS, STEPS, a_batch, a_runner, by_modules

pytestmark = pytest.mark.skipif(
    not can_multiply(torch.zeros(1)), reason="this CPU has no such instructions, or no compiler"
)

KINDS = {
    "all": {"rank": 3},
    "wide": {"rank": 40, "only": "attention.v"},
    "deep": {"rank": 8, "only": "2.mlp"},
    "dora": {"rank": 5, "use_dora": True},
    "dora-keys": {"rank": 4, "only": "attention.k", "use_dora": True},
}
"""What they change: a rank that fills no unit of bfloat16, one that fills no panel, one of the last block;
with factors, all layers and one part of a merged layer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Name of a family -> its adapters, by kind."""
    made = {}
    for name, config in CONFIGS.items():
        model, where = Decoder(config), tmp_path_factory.mktemp(name)
        made[name] = {
            kind: save_lora(where / kind, model, seed=seed, **of)
            for seed, (kind, of) in enumerate(KINDS.items())
        }
    return made


def with_adapters(runner, folders):
    for kind, folder in folders.items():
        runner.add_adapter(kind, folder)
    return runner


def worn(batch, adapters):
    """Return the step with these adapters of its shares."""
    return replace(batch, adapters=np.array(adapters, np.int32))


WORN = [[0, -1, 1], [2, 2, 2], [1, 0, -1], [3, -1, 0], [4, 3, 1]]


@pytest.mark.parametrize("weights", ["stored", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_whole_step_adds_what_layers_with_adapters_do(folders, name, dtype, weights):
    runner = with_adapters(a_runner(name, dtype=dtype, weights=weights), folders[name])
    plain = a_runner(name, dtype=dtype, weights=weights)
    steps = [[worn(a_batch(spans), adapters[: len(spans)]) for spans in STEPS] for adapters in WORN]
    ours = [[runner.run(step).logits for step in each] for each in steps]
    without = [plain.run(a_batch(spans)).logits for spans in STEPS]
    blocks = with_adapters(by_modules(runner), folders[name])  # it wraps the layers
    for adapters, each, found in zip(WORN, steps, ours, strict=True):
        for step, logits, bare in zip(each, found, without, strict=True):
            expected = blocks.run(step).logits
            off = (logits - expected).norm() / expected.norm()
            # else rounded apart
            assert off < (1e-5 if dtype is torch.float32 and weights == "stored" else 0.15), adapters
            assert (bare - expected).norm() / expected.norm() > (0.3 if 4 not in adapters else 0.2), adapters
            for share, adapter in enumerate(step.adapters):
                rows = slice(*step.query_starts[share : share + 2])
                assert torch.equal(logits[rows], bare[rows]) == (adapter < 0), adapters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_share_with_an_adapter_does_not_depend_on_its_neighbours(folders, dtype):
    runner = with_adapters(a_runner(dtype=dtype), folders["llama"])
    alone = runner.run(worn(a_batch(STEPS[0][:1]), [0])).logits
    for others in ([-1, -1], [0, 0], [1, 2], [3, 4]):
        together = runner.run(worn(a_batch(STEPS[0]), [0, *others])).logits
        assert torch.equal(together[: len(alone)], alone)


@pytest.mark.parametrize("asked", [(6,), (3, 16), (7,)], ids=str)
def test_tokens_that_the_last_block_leaves_out_change_nothing(folders, asked):
    runner = with_adapters(a_runner(), folders["llama"])
    adapters = [2, -1, 3]
    whole = runner.run(worn(a_batch(STEPS[0]), adapters)).logits
    some = runner.run(worn(a_batch(STEPS[0], asked=asked), adapters)).logits
    assert torch.equal(some, whole[list(asked)])


def test_an_adapter_that_is_not_held_is_refused(folders):
    runner = with_adapters(a_runner(), folders["llama"])
    runner.run(worn(a_batch(STEPS[0]), [2, 1, 0]))
    runner.remove_adapter("wide")
    with pytest.raises(RuntimeError, match="there is no adapter 1"):
        runner.run(worn(a_batch(STEPS[0]), [2, 1, 0]))
    runner.add_adapter("wide", folders["llama"]["wide"])  # while the network exists, and under a new index
    runner.run(worn(a_batch(STEPS[0]), [2, 5, 0]))


def test_panels_that_do_not_fit_the_network_are_refused(folders):
    runner = with_adapters(a_runner(), folders["llama"])
    runner.run(worn(a_batch(STEPS[0]), [0, 0, 0]))
    network = runner._native._network
    panels, rank = adapter_panels(runner._adapters.held("dora")[1], runner.model, torch.float32)
    with pytest.raises(RuntimeError, match="an adapter of rank 5 with 35 operands"):
        network.hold(9, panels[:-1], rank)
    a, b, scaling, *rest = panels
    for wrong in ([b, b, scaling], [a, a, scaling], [a, b, scaling[0]]):
        with pytest.raises(RuntimeError, match="numbers belong"):
            network.hold(9, [*wrong, *rest], rank)
    with pytest.raises(RuntimeError, match="there is no adapter 9"):
        runner.run(worn(a_batch(STEPS[0]), [9, 0, 0]))
