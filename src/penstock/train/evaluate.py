"""Loss on held-out rows: the same rows and the same mean on any number of ranks."""

import numpy as np
import torch

from penstock.data.types import IGNORED_LABEL
from penstock.parallel.mesh import Mesh, World
from penstock.train.step import loss_sum, micro_batches
from penstock.train.supply import Heldout


@torch.no_grad()
def heldout_loss(model: torch.nn.Module, heldout: Heldout, world: World, mesh: Mesh, *, rows: int) -> float:
    """Return the mean loss over the held-out rows, in nats; every rank must call it.

    Args:
        rows: rows per forward pass. Every rank makes as many passes; what it has too many of is
            masked.
    """
    rank, world_size = mesh.data_rank, mesh.layout.num_data
    samples, passes = heldout.rows, -(-heldout.rows // (rows * world_size))
    total, labels = 0.0, 0
    model.eval()
    for index in range(passes):
        first = (index * world_size + rank) * rows
        wanted = np.arange(first, first + rows)
        batch = heldout.loader.gather(np.minimum(wanted, samples - 1))
        batch["labels"][torch.from_numpy(wanted >= samples)] = IGNORED_LABEL
        (part,) = micro_batches(batch, rows=rows, device=world.device)
        total += loss_sum(model, part).item()
        labels += int((batch["labels"] != IGNORED_LABEL).sum())
    model.train()
    loss, count = world.sum(total, labels)
    return loss / max(count, 1.0)
