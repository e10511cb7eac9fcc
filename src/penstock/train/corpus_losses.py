"""The loss of a step by corpus: sums over this rank's rows, to be summed over ranks with the others."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.data.types import IGNORED_LABEL
from penstock.train.state import Batch, TrainState


class CorpusLosses:
    """Adds up the losses of rows by corpus, exactly: float64 sums in the order of the rows.

    Args:
        corpora: how many there are.
        of_rows: [rows] the corpus of each row of this rank's batch.
    """

    def __init__(self, corpora: int, of_rows: Tensor) -> None:
        self._one_of = functional.one_hot(of_rows, corpora).double()
        self._next = 0
        self.sums = torch.zeros(corpora, dtype=torch.float64, device=of_rows.device)

    def add(self, rows: Tensor) -> None:
        """Add the summed losses of the next rows [n] float64."""
        past = self._next + len(rows)
        self.sums += rows @ self._one_of[self._next : past]  # not an atomic add, whose order would vary
        self._next = past

    def labels(self, counts: Tensor) -> Tensor:
        """Return the labels of each corpus, given those of each row [rows]."""
        return counts.double() @ self._one_of


def corpus_losses(state: TrainState, batch: Batch, device: torch.device) -> CorpusLosses | None:
    """Return what adds up the losses by corpus, where the mixture follows them."""
    if state.adaptive is None:
        return None
    of_rows = state.loader.corpora_of(batch["sample_ids"].cpu().numpy())
    return CorpusLosses(len(state.loader.corpora), torch.from_numpy(of_rows).to(device))


def found_by_corpus(by_corpus: CorpusLosses | None, labels: Tensor) -> list[float]:
    """Return this rank's sums and labels of each corpus, one after the other.

    Args:
        labels: [rows, seq] of this rank.
    """
    if by_corpus is None:
        return []
    counts = (labels != IGNORED_LABEL).sum(1).to(by_corpus.sums.device)
    return [*by_corpus.sums.tolist(), *by_corpus.labels(counts).tolist()]
