"""Penstock's loader as a torchtitan dataloader, saved by torch.distributed.checkpoint, on other ranks.

torchtitan's own loaders refuse another degree. Without torchtitan, the protocol of its base class stands in.

Run it with the folder of a corpus:  python examples/05-torchtitan.py corpus
"""

import json
import sys
import tempfile
from itertools import islice

import torch.distributed.checkpoint as dcp

from penstock.data import Loader

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError:
    from torch.distributed.checkpoint.stateful import Stateful as BaseDataLoader


class PenstockDataLoader(BaseDataLoader):
    """What the build() of a torchtitan Config returns; the tokenizer it offers is not needed any more."""

    def __init__(self, corpus, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_not_needed):
        shape = {"sequence_length": seq_len, "global_batch_size": local_batch_size * dp_world_size}
        fields = ("input_ids", "labels", "position_ids")
        self.loader = Loader({"docs": corpus}, rank=dp_rank, world_size=dp_world_size, fields=fields, **shape)

    def __iter__(self):
        for batch in self.loader:
            yield {"input": batch["input_ids"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self):
        return {"loader": json.dumps(self.loader.state_dict())}  # as one value: DCP loads what it finds here

    def load_state_dict(self, state):
        self.loader.load_state_dict(json.loads(state["loader"]))


def open_ranks(corpus: str, *, world_size: int) -> list[PenstockDataLoader]:
    shape = {"dp_world_size": world_size, "seq_len": 32, "local_batch_size": 8 // world_size}
    return [PenstockDataLoader(corpus, dp_rank=rank, **shape) for rank in range(world_size)]


def rows(loader: PenstockDataLoader, steps: int) -> list[list[int]]:
    return [row for inputs, _ in islice(loader, steps) for row in inputs["input"].tolist()]


if __name__ == "__main__":
    two, four = open_ranks(sys.argv[1], world_size=2), open_ranks(sys.argv[1], world_size=4)
    seen = [row for rank in two for row in rows(rank, 3)]
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"dataloader": two[0]}, checkpoint_id=folder, no_dist=True)
        for rank in four:
            dcp.load({"dataloader": rank}, checkpoint_id=folder, no_dist=True)
    seen += [row for rank in four for row in rows(rank, 3)]
    assert sorted(seen) == sorted(rows(*open_ranks(sys.argv[1], world_size=1), 6)), "six steps, each row once"
    print(f"two ranks, then four ({BaseDataLoader.__module__}): every row once")
