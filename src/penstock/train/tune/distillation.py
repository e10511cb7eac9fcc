"""Distillation: the divergence from a teacher's most likely tokens, in place of cross entropy.

The teacher's top k are columns beside the corpus, written by `penstock data teach`; the teacher itself takes
no memory in training. On held-out rows the loss is that of the next token, comparable with other runs.
"""

import torch
from torch import Tensor

from penstock.data.corpus.columns import TEACHER_IDS, TEACHER_LOG_PROBS
from penstock.data.types import IGNORED_LABEL
from penstock.nn.head import OutputHead
from penstock.nn.top_k_divergence import top_k_divergence
from penstock.train.loss import CorpusLosses
from penstock.train.objective import DeviceBatch, Finish

TEACHER_FIELDS = (TEACHER_IDS, TEACHER_LOG_PROBS)
"""Columns that `distilled` reads from a batch."""


def distilled(part: DeviceBatch, losses: CorpusLosses | None, *, temperature: float) -> Finish:
    """Return the summed divergence from the teacher over the labels; see `label_mean.TokenLoss`."""
    labels = part["labels"]
    learned = (labels.flatten() != IGNORED_LABEL).nonzero()[:, 0]
    ids, log_probs = (
        torch.cat(part[name]) if isinstance(part[name], tuple) else part[name] for name in TEACHER_FIELDS
    )
    k = 1 if ids.ndim == 2 else ids.shape[2]  # a column of one value per token has no axis for it

    def divergence(hidden: Tensor, head: OutputHead) -> Tensor:
        total, each = top_k_divergence(
            hidden.flatten(0, 1)[learned],
            head,
            ids.flatten(0, 1)[learned].view(len(learned), k),
            log_probs.flatten(0, 1)[learned].view(len(learned), k),
            temperature=temperature,
        )
        if losses is not None:
            by_row = each.new_zeros(labels.numel(), dtype=torch.float64).index_copy(0, learned, each.double())
            losses.add(by_row.view_as(labels).sum(1))
        return total

    return divergence
