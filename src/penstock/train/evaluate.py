"""Validation: loss on held-out rows by corpus, independent of the number of ranks."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from penstock.core.arrays import Int64
from penstock.data.types import IGNORED_LABEL
from penstock.parallel.mesh import Mesh, World
from penstock.train.data_setup import Heldout
from penstock.train.loss import CorpusLosses, next_token_loss
from penstock.train.objective import DeviceBatch
from penstock.train.score import Score
from penstock.train.step import ALL, check_vocabulary, loss_sum, micro_batches


def heldout_scores(
    model: torch.nn.Module, heldout: Heldout, world: World, mesh: Mesh, *, rows: int
) -> dict[str, Score]:
    """Return the scores of the held-out rows by corpus; every rank must call it.

    Args:
        rows: rows per forward pass. All ranks make equally many passes; excess rows are masked.
    """
    share = mesh.data_rank, mesh.layout.num_data
    mine = score_rows(
        model, heldout, device=world.device, rows=rows, share=share, slice_of=mesh.sequence_slice
    )
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
    slice_of: Callable[[int], slice] = lambda _length: ALL,
    on_rows: Callable[[int], None] = lambda _done: None,
) -> dict[str, tuple[float, float, float]]:
    """Return summed loss in nats, labels and bytes of one share of the rows, by corpus.

    Args:
        share: (index, number) of the share.
        slice_of: row length -> slice of each row to score on this rank; the model sees the rest.
        on_rows: called before each batch is scored, with the number of rows done after it over all shares.

    Raises:
        CorpusError: a token id is outside the model's vocabulary.
    """
    names = list(heldout.loader.corpora)
    sums = torch.zeros(3, len(names), dtype=torch.float64)
    was_training = model.training
    model.eval()
    samples = np.arange(heldout.rows)
    batches = batches_of_share(model, heldout, samples, share=share, rows=rows)
    for number, (batch, of_batch) in enumerate(batches, 1):
        on_rows(min(number * share[1] * rows, heldout.rows))
        sequence_slice = slice_of(batch["labels"].shape[1])
        sums += _sums(model, batch, heldout, of_batch, device=device, sequence_slice=sequence_slice)
    model.train(was_training)
    return {
        name: (nats, tokens, size) for name, (nats, tokens, size) in zip(names, sums.T.tolist(), strict=True)
    }


def positions_of_share(count: int, *, share: tuple[int, int], rows: int) -> Int64:
    """Return which of `count` samples are in each batch of one share: [batches, rows] positions.

    Every share has equally many batches; positions from `count` on are excess.

    >>> positions_of_share(5, share=(1, 2), rows=2).tolist()
    [[2, 3], [6, 7]]
    """
    index, number = share
    batches = -(-count // (rows * number))
    return np.arange(batches * number * rows).reshape(batches, number, rows)[:, index]


def batches_of_share(
    model: torch.nn.Module, heldout: Heldout, samples: Int64, *, share: tuple[int, int], rows: int
) -> Iterator[tuple[DeviceBatch, Int64]]:
    """Yield the batches of one share of some held-out samples, each with its samples.

    Every share has equally many; excess rows have no label, and are part of no pair.

    Args:
        samples: [n] ids.
        share: (index, number) of the share.
        rows: rows of each batch.

    Raises:
        CorpusError: a token id is outside the model's vocabulary; with the document that has it.
    """
    for wanted in positions_of_share(len(samples), share=share, rows=rows):
        of_batch = samples[np.minimum(wanted, len(samples) - 1)]
        batch = heldout.loader.gather(of_batch)
        excess = torch.from_numpy(wanted >= len(samples))
        batch["labels"][excess] = IGNORED_LABEL
        if "rejected" in batch:
            batch["rejected"][excess] = False
        _check(batch, of_batch, heldout, model)
        yield batch, of_batch


def _check(batch: DeviceBatch, samples: Int64, heldout: Heldout, model: torch.nn.Module) -> None:
    """Refuse token ids of held-out rows that are outside the model's vocabulary."""
    check_vocabulary(
        batch,
        model.config.vocab_size,  # type: ignore[union-attr, arg-type]
        spans_of=lambda row: heldout.loader.explain(samples[row : row + 1])[0],
    )


def _sums(
    model: torch.nn.Module,
    batch: DeviceBatch,
    heldout: Heldout,
    samples: Int64,
    *,
    device: torch.device,
    sequence_slice: slice,
) -> torch.Tensor:
    """Return nats, labels and bytes of a batch by corpus, [3, corpora] float64."""
    of_rows = torch.from_numpy(heldout.loader.corpora_of(samples))
    by_corpus = CorpusLosses(len(heldout.loader.corpora), of_rows)
    on_device = CorpusLosses(len(heldout.loader.corpora), of_rows.to(device))
    (part,) = micro_batches(batch, rows=len(samples), device=device, sequence_slice=sequence_slice)
    loss_sum(model, part, next_token_loss(part["labels"], on_device.add))
    labels = batch["labels"][:, sequence_slice]
    return torch.stack(
        [
            on_device.sums.cpu(),
            by_corpus.labels((labels != IGNORED_LABEL).sum(1)),
            by_corpus.labels(_text_bytes(labels, heldout)),
        ]
    )


def _text_bytes(labels: torch.Tensor, heldout: Heldout) -> torch.Tensor:
    """Return the bytes of text of the labels of each row [rows, length], [rows]."""
    if heldout.token_bytes is None:
        return torch.zeros(len(labels), dtype=torch.int64)
    table = torch.from_numpy(heldout.token_bytes)
    has_text = (labels >= 0) & (labels < len(table))  # excludes ignored labels and unknown ids
    return (table[labels * has_text] * has_text).sum(1)
