"""Loss on held-out rows, by corpus: the same rows and the same sums on any number of ranks."""

from collections.abc import Callable

import numpy as np
import torch

from penstock.data.types import IGNORED_LABEL, Int64
from penstock.parallel.mesh import Mesh, World
from penstock.train.corpus_losses import CorpusLosses
from penstock.train.score import Score
from penstock.train.state import Batch
from penstock.train.step import ALL, loss_sum, micro_batches
from penstock.train.supply import Heldout


def heldout_scores(
    model: torch.nn.Module, heldout: Heldout, world: World, mesh: Mesh, *, rows: int
) -> dict[str, Score]:
    """Return the scores of the held-out rows by corpus; every rank must call it.

    Args:
        rows: rows per forward pass. Every rank makes as many passes; what it has too many of is
            masked.
    """
    share = mesh.data_rank, mesh.layout.num_data
    mine = score_rows(model, heldout, device=world.device, rows=rows, share=share, stretch_of=mesh.stretch)
    sums = world.sum(*(value * mesh.has_loss for score in mine.values() for value in score))
    return {
        name: Score(
            nats=sums[3 * index] / mesh.copies,
            tokens=round(sums[3 * index + 1] / mesh.copies),
            text_bytes=round(sums[3 * index + 2] / mesh.copies),
        )
        for index, name in enumerate(mine)
    }


@torch.no_grad()
def score_rows(
    model: torch.nn.Module,
    heldout: Heldout,
    *,
    device: torch.device,
    rows: int,
    share: tuple[int, int] = (0, 1),
    stretch_of: Callable[[int], slice] = lambda _length: ALL,
    on_batch: Callable[[Batch, int], None] = lambda _batch, _done: None,
) -> dict[str, tuple[float, float, float]]:
    """Return nats, labels and bytes of one share of the rows, by corpus.

    Args:
        share: which of how many shares.
        stretch_of: given the length of a row, the part of it to score here; the model sees the rest.
        on_batch: receives each batch before it is scored, and how many rows are done with it, those of
            other shares counted.
    """
    part, parts = share
    names = list(heldout.loader.corpora)
    sums = torch.zeros(3, len(names), dtype=torch.float64)
    was_training = model.training
    model.eval()
    for index in range(-(-heldout.rows // (rows * parts))):
        first = (index * parts + part) * rows
        wanted = np.arange(first, first + rows)
        samples = np.minimum(wanted, heldout.rows - 1)
        batch = heldout.loader.gather(samples)
        batch["labels"][torch.from_numpy(wanted >= heldout.rows)] = IGNORED_LABEL
        on_batch(batch, min(first + rows, heldout.rows))
        stretch = stretch_of(batch["labels"].shape[1])
        sums += _sums(model, batch, heldout, samples, device=device, stretch=stretch)
    model.train(was_training)
    return {
        name: (nats, tokens, size) for name, (nats, tokens, size) in zip(names, sums.T.tolist(), strict=True)
    }


def _sums(
    model: torch.nn.Module,
    batch: Batch,
    heldout: Heldout,
    samples: Int64,
    *,
    device: torch.device,
    stretch: slice,
) -> torch.Tensor:
    """Return nats, labels and bytes of a batch by corpus, [3, corpora] float64."""
    of_rows = torch.from_numpy(heldout.loader.corpora_of(samples))
    by_corpus = CorpusLosses(len(heldout.loader.corpora), of_rows)
    on_device = CorpusLosses(len(heldout.loader.corpora), of_rows.to(device))
    (part,) = micro_batches(batch, rows=len(samples), device=device, stretch=stretch)
    loss_sum(model, part, on_device)
    labels = batch["labels"][:, stretch]
    return torch.stack(
        [
            on_device.sums.cpu(),
            by_corpus.labels((labels != IGNORED_LABEL).sum(1)),
            by_corpus.labels(_text_bytes(labels, heldout)),
        ]
    )


def _text_bytes(labels: torch.Tensor, heldout: Heldout) -> torch.Tensor:
    """Return the bytes of text that the labels of each row [rows, length] stand for, [rows]."""
    if heldout.token_bytes is None:
        return torch.zeros(len(labels), dtype=torch.int64)
    table = torch.from_numpy(heldout.token_bytes)
    has_text = (labels >= 0) & (labels < len(table))  # neither what is ignored nor ids the tokenizer lacks
    return (table[labels * has_text] * has_text).sum(1)
