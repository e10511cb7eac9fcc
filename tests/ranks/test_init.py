"""Initial weights sharded over gloo ranks against those of one process."""

import os
import tempfile

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from penstock.models.decoder.config import DecoderConfig
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights

# 5 key-value columns and 67 rows: no dimension divides by the ranks, and norms leave some rank empty
CONFIG = DecoderConfig(
    vocab_size=67,
    hidden_size=30,
    intermediate_size=3,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
)


def initialised(*, mesh=None):
    with torch.device("meta"):
        model = Decoder(CONFIG)
    if mesh is not None:
        for block in model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    init_weights(model, seed=11)
    return model


def one_rank(rank, world_size, store, mesh_shape):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        names = ("replicas", "shards")[-len(mesh_shape) :]
        model = initialised(mesh=init_device_mesh("cpu", mesh_shape, mesh_dim_names=names))
        whole = dict(initialised().named_parameters())
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            assert torch.equal(parameter.full_tensor(), whole[name]), name
        ids = torch.arange(12).view(2, 6)
        with torch.no_grad():
            torch.testing.assert_close(model(ids), Decoder.forward(initialised(), ids), rtol=0, atol=1e-6)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12 on fork with threads
@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=["2 ranks", "4 ranks", "2 replicas of 2"])
def test_sharded_initial_weights_equal_those_of_one_process_bit_for_bit(mesh_shape):
    world_size = int(torch.tensor(mesh_shape).prod())
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            one_rank,
            args=(world_size, f"{folder}/store", mesh_shape),
            nprocs=world_size,
            start_method="fork",  # torch is already imported, which a fresh process would pay for
        )
