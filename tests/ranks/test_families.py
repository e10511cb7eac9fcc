"""Every family sharded over gloo ranks against the same model in one process: losses and gradients."""

import pytest
import torch
from tests.rank_batches import RankBatches
from tests.tiny_models import of_every_family

from penstock.models import FAMILIES
from penstock.models.decoder.model import Decoder
from penstock.models.family.config_json import config_of
from penstock.nn.init import init_weights
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import make_mesh
from penstock.parallel.sharding.fsdp import shard
from penstock.train.loss import next_token_loss

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 5,
    "pad_token_id": None,
}
CONFIGS = {name: config_of(config.to_dict()) for name, config in of_every_family(**SIZES).items()}
IDS = torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 5, 16, 23, 32], dtype=torch.int32)  # of two rows


def gradients(config, world=None):
    """Return the loss and the gradients of IDS, over two ranks or in one process."""
    with torch.device("meta"):
        model = Decoder(config)
    if world is not None:
        mesh = make_mesh(world, RankLayout(shard=world.ranks.world_size)).data
        shard(model, mesh, compute_dtype=torch.float32)
    model.to_empty(device="cpu")
    init_weights(model, seed=3)
    halves = IDS.split(2)
    mine = halves if world is None else halves[world.ranks.rank : world.ranks.rank + 1]
    total = torch.zeros(())
    for rows in mine:
        loss = model(rows, cu_seqlens=ENDS, finish=next_token_loss(rows.roll(-1, 1)))
        total = total + loss.detach()
        (loss * (1 if world is None else len(halves))).backward()  # FSDP averages over ranks
    whole = {
        name: (p.grad if world is None else p.grad.full_tensor()).clone()
        for name, p in model.named_parameters()
    }
    return total.item(), whole


@pytest.fixture(scope="module")
def results():
    """The loss and gradients of a family on two ranks and of each of them alone."""

    def both(family, world):
        return gradients(CONFIGS[family], world), gradients(CONFIGS[family])

    return RankBatches(dict.fromkeys(CONFIGS, 2), both)


def test_every_family_is_tried():
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_sharded_model_has_the_loss_and_gradients_of_one_process(results, family):
    """Sums of float32 in another order: 1e-5 of a loss that sums 64 labels, 1e-6 of the largest gradient."""
    of_ranks = results.of(family)
    _, (loss, expected) = of_ranks[0]
    assert sum(part for (part, _), _ in of_ranks) == pytest.approx(loss, rel=1e-5)
    for (_, sharded), _ in of_ranks:
        assert sharded.keys() == expected.keys()
        for name, gradient in expected.items():
            assert gradient.abs().max() > 0, name
            torch.testing.assert_close(
                sharded[name], gradient, rtol=0, atol=1e-6 * max(1.0, gradient.abs().max().item()), msg=name
            )
