"""A step with adapters on ranks that share the layers, against one rank, in one call and block by block."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from tests.loras import save_lora
from tests.ranks.test_ranked_steps import by_modules, save_of_neurons
from tests.unit.engine.model_runner.test_whole_steps import BLOCK_SIZE, STEPS, a_batch

from penstock.checkpoint.hf import load_pretrained
from penstock.engine.config import EngineConfig
from penstock.engine.workers.model_shard import open_part
from penstock.models.decoder.tensor_slices import TensorParallelRank
from penstock.nn.linear.packed import can_multiply
from penstock.testing.ranks import on_ranks


def adapted_steps(world, *, folder, adapters):
    """Return whether steps were one call, and the logits of a step with adapters, so and by blocks."""
    place = TensorParallelRank(world.ranks.rank, world.ranks.world_size)
    config = EngineConfig(device="cpu", tensor_parallel=place.ranks, adapters=adapters)
    part, _ = open_part(folder, config, place=place)
    if part.group is not None:
        part.group.join(folder / "meeting-adapters")
    runner = part.runner(num_blocks=10, block_size=BLOCK_SIZE)
    ours, theirs = (each.run(WITH_ADAPTERS).logits for each in (runner, by_modules(part)))
    part.close()
    return runner._native is not None, ours, theirs


WITH_ADAPTERS = replace(a_batch(STEPS[0]), adapters=np.array([1, -1, 0], np.int32))


@pytest.mark.parametrize("family", ["llama", "qwen2-one-head"])  # biases everywhere; a head that ranks share
def test_ranks_scale_their_outputs_by_the_lengths_of_whole_rows(family, tmp_path):
    """DoRA beside LoRA, against one rank."""
    save_of_neurons(64, family, tmp_path / "base")
    model, adapters = load_pretrained(tmp_path / "base"), {}
    for number, name in enumerate(("lora", "dora")):
        adapters[name] = save_lora(tmp_path / name, model, rank=3, seed=number, use_dora=name == "dora")
    run = partial(adapted_steps, folder=tmp_path / "base", adapters=adapters)
    ((is_whole, expected, by_blocks),) = on_ranks(run, ranks=1)
    assert is_whole == can_multiply(torch.zeros(1))
    for found in (by_blocks, *on_ranks(run, ranks=2)[0][1:]):
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
