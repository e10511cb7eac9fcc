"""Ranks that share every layer of a decoder compute what one rank computes."""

import pytest
import torch
import torch.distributed as dist
from tests.rank_batches import RankBatches
from tests.tiny_models import CONFIGS, save_tiny_model

from penstock.checkpoint.hf import load_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.core.errors import UsageError
from penstock.engine.model_runner.collectives import RankGroup
from penstock.engine.model_runner.tensor_parallel import GatheredLogits, join_ranks
from penstock.models.decoder.tensor_slices import TensorParallelRank, check_ranks
from penstock.nn.softcap import capped

IDS = torch.tensor([[3, 1, 200, 105, 44, 9, 210, 0, 17, 106, 23, 69]])


@torch.inference_mode()
def compute(folder, meeting, world):
    """Return the logits, on the first rank, and the parameters that this rank has."""
    place = TensorParallelRank(world.ranks.rank, world.ranks.world_size)
    group = RankGroup(place, world.device)
    group.join(meeting)
    whole = read_config(folder)
    model = load_pretrained(folder, place=place)
    size = sum(parameter.numel() for parameter in model.parameters())
    join_ranks(model, whole, group)
    hidden = model.hidden(IDS)[0]
    logits = capped(GatheredLogits(model, group)(hidden), whole.final_logit_softcapping)
    dist.barrier()  # who is done first would end connections that others still use
    group.close()
    return logits, hidden, size


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny model of each family."""
    where = tmp_path_factory.mktemp("models")
    for family in CONFIGS:
        save_tiny_model(family, where / family)
    return where


@pytest.fixture(scope="module")
def batches(folders):
    """What each rank computes, by family and number of ranks."""
    cases = {f"{family}, {ranks}": (family, ranks) for family in CONFIGS for ranks in (2, 4)}
    return RankBatches(
        {case: ranks for case, (_, ranks) in cases.items()},
        lambda case, world: compute(folders / cases[case][0], folders / f"meeting, {case}", world),
    )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", CONFIGS)
def test_ranks_together_compute_what_one_does(batches, folders, family, ranks):
    model = load_pretrained(folders / family)
    with torch.inference_mode():
        expected = model(IDS)[0]
    found = batches.of(f"{family}, {ranks}")
    torch.testing.assert_close(found[0][0], expected, rtol=1e-4, atol=1e-4)
    assert all(logits.shape == (IDS.shape[1], 0) for logits, *_ in found[1:])
    assert all(torch.equal(hidden, found[0][1]) for _, hidden, _ in found)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert max(size for *_, size in found) < 1.35 * whole / ranks  # key-value heads may be on two


def test_a_number_of_ranks_that_divides_no_heads_is_refused(tmp_path):
    save_tiny_model("llama", tmp_path)
    with pytest.raises(UsageError, match=r"4 query heads .* \(got 3\)\. Set tensor_parallel to 1 or 2 or 4"):
        check_ranks(read_config(tmp_path), 3)
