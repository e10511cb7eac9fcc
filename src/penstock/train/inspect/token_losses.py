"""Loss of each token of some rows under a model, as training computes it."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.data.types import IGNORED_LABEL
from penstock.models.llama.model import Llama
from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead
from penstock.train.step import check_vocabulary, loss_sum, micro_batches


@torch.no_grad()
def token_losses(model: Llama, batch: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Return the cross entropy of each label in nats, [rows, length] float32; NaN where there is none.

    Attention stays within documents, as in training. One row is computed at a time, in the model's dtype.

    Args:
        model: in evaluation mode.
        batch: arrays of the fields of a training step.

    Raises:
        CorpusError: a token id is outside the model's vocabulary.
    """
    tensors = {name: torch.from_numpy(np.array(of)) for name, of in batch.items() if name != "sample_ids"}
    check_vocabulary(tensors, model.config.vocab_size)
    found: list[Tensor] = []

    for part in micro_batches(tensors, rows=1, device=model.norm.weight.device):
        labels = part["labels"].flatten()

        def finish(hidden: Tensor, head: OutputHead, labels: Tensor = labels) -> Tensor:
            total, each = cross_entropy(hidden.flatten(0, 1), head, labels, ignored=IGNORED_LABEL)
            found.append(torch.where(labels == IGNORED_LABEL, torch.nan, each.float()).cpu())
            return total

        loss_sum(model, part, finish)
    return torch.stack(found).numpy()
