"""Parameters that each rank holds whole: the gradients are those of the plain model, without a copy."""

import gc

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.parallel.apply import has_work
from penstock.parallel.sharding.fsdp import ReduceWhole, shard
from penstock.testing.ranks import on_ranks

SHAPE = DecoderConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=8,
)  # fmt: skip
ROWS = torch.arange(32).view(4, 8)


def gradients(model):
    """Two micro-batches that add up, then a step of its own; all gradients of both."""
    found = []
    for parts in (ROWS.chunk(2), [ROWS + 1]):
        for part in parts:
            model(part % 32).square().mean().backward()
        held = [parameter.grad for parameter in model.parameters()]
        found += [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in held]
        model.zero_grad()
    return found


def sharded(shape, names):
    model = Decoder(SHAPE)
    init_weights(model, seed=0)
    shard(model, init_device_mesh("cpu", shape, mesh_dim_names=names), compute_dtype=torch.float32)
    return model


@pytest.mark.parametrize(("shape", "names"), [((1,), ("shard",)), ((2, 1), ("replicate", "shard"))])
def test_gradients_of_whole_parameters_add_up_as_those_of_the_plain_model(shape, names):
    def compare(_):
        plain = Decoder(SHAPE)
        init_weights(plain, seed=0)
        pairs = zip(gradients(sharded(shape, names)), gradients(plain), strict=True)
        return [float((ours - theirs).abs().max()) for ours, theirs in pairs]

    for differences in on_ranks(compare, ranks=shape[0]):
        assert differences == [0.0] * len(differences)


def test_one_rank_has_work_for_fsdp_only_where_parameters_are_moved():
    def asked(_):
        mesh = init_device_mesh("cpu", (1,))
        return has_work(mesh, offload=False), has_work(mesh, offload=True)

    assert on_ranks(asked, ranks=1) == [(False, True)]


def test_a_reduction_gives_back_what_it_was_given_and_forgets_one_that_failed():
    memory = ReduceWhole()

    def ask():
        return memory.allocate((4,), dtype=torch.float32, device=torch.device("cpu"))

    first, again, second = ask(), ask(), ask()
    assert again is first
    assert second is not first
    del second  # asked for once only
    gc.collect()
    third = ask()
    assert third is not first
    assert ask() is third
