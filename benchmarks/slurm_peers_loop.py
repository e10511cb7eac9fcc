"""A loop as in PyTorch's tutorial of fault-tolerant training, for `slurm_peers.py`; nothing of Penstock's.

Started by torchrun. A snapshot of model, optimizer and step every so many steps, by the first rank; a start
loads it. The data are a `DistributedSampler`'s, whose position is in no snapshot. Like the tutorial, it does
nothing on SIGTERM. Each rank appends what it trained on: start, step, sample ids.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

ROWS, TOKENS_A_ROW, VOCABULARY = 12, 32, 400


class Numbered(Dataset):
    """Rows that know their number."""

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return index, torch.randint(
            VOCABULARY, [TOKENS_A_ROW], generator=torch.Generator().manual_seed(index)
        )


def train(folder, steps, every):
    """Train to a step, from the snapshot if there is one."""
    dist.init_process_group("gloo")
    rank, snapshot = dist.get_rank(), folder / "snapshot.pt"
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    ranked = DistributedDataParallel(model)
    data = Numbered()
    batches = DataLoader(data, batch_size=ROWS // dist.get_world_size(), sampler=DistributedSampler(data))
    with (folder / f"rank-{rank}.jsonl").open("a") as log:
        log.write(json.dumps({"resumed": step}) + "\n")
        for ids, rows in batches:
            loss = torch.nn.functional.cross_entropy(
                ranked(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            log.write(json.dumps({"step": step, "ids": ids.tolist()}) + "\n")
            log.flush()
            time.sleep(0.05)  # a step of the time that ours takes
            if rank == 0 and step % every == 0:
                whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(whole, folder / "snapshot.tmp")
                os.replace(folder / "snapshot.tmp", snapshot)  # noqa: PTH105
            if step == steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, required=True)
    given = parser.parse_args()
    train(given.folder, given.steps, given.every)
