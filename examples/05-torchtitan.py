"""Penstock's loader as a torchtitan dataloader, saved by torch.distributed.checkpoint, on other ranks.

torchtitan's own loaders refuse another degree. Run it with a corpus:  python examples/05-torchtitan.py corpus
"""

import json
import sys
import tempfile
from dataclasses import dataclass
from itertools import islice

import torch.distributed.checkpoint as dcp
from torchtitan.components.dataloader import BaseDataLoader

from penstock.data import Loader


class PenstockDataLoader(BaseDataLoader):
    """What its Config builds from what torchtitan offers; of that, a tokenizer is not needed any more."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """For a trainer's config: dataloader=PenstockDataLoader.Config(dataset_path="corpora/web")."""

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_not_needed):
        shape = {"sequence_length": seq_len, "global_batch_size": local_batch_size * dp_world_size}
        shape |= {"rank": dp_rank, "world_size": dp_world_size}
        fields = ("input_ids", "labels", "position_ids")
        self.loader = Loader({"docs": config.dataset_path}, fields=fields, **shape)

    def __iter__(self):
        for batch in self.loader:
            yield {"input": batch["input_ids"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self):
        return {"loader": json.dumps(self.loader.state_dict())}  # as one value: DCP loads what it finds here

    def load_state_dict(self, state):
        self.loader.load_state_dict(json.loads(state["loader"]))


def open_ranks(corpus: str, *, world_size: int) -> list[PenstockDataLoader]:
    config = PenstockDataLoader.Config(dataset_path=corpus)
    shape = {"dp_world_size": world_size, "seq_len": 32, "local_batch_size": 8 // world_size}
    return [config.build(dp_rank=rank, tokenizer=None, **shape) for rank in range(world_size)]


def rows(loaders: list[PenstockDataLoader], steps: int) -> list[list[int]]:
    return [row for rank in loaders for inputs, _ in islice(rank, steps) for row in inputs["input"].tolist()]


if __name__ == "__main__":
    one, two, four = (open_ranks(sys.argv[1], world_size=size) for size in (1, 2, 4))
    seen = rows(two, 3)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"dataloader": two[0]}, checkpoint_id=folder, no_dist=True)
        for rank in four:
            dcp.load({"dataloader": rank}, checkpoint_id=folder, no_dist=True)
    assert sorted(seen + rows(four, 3)) == sorted(rows(one, 6)), "six steps, each row once"
    print("two ranks, then four: every row once")
