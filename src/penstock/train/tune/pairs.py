"""Sides of pairs in a batch: a pair is one document, the chosen conversation and then the rejected one.

The column `rejected` is 1 on the tokens of the rejected side. As every column it is aligned with labels:
entry t describes the token that label t names. So a side ends at the position t where it turns on:

    tokens      c0 c1 c2 r0 r1 r2 | next document
    labels      c1 c2 r0 r1 r2  -
    rejected     0  0  1  1  1  0
                       ^ turns on: the label r0 is dropped, and r0 is the first token of a sequence of its own

The two sides then do not attend to each other, and positions restart.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from penstock.core.errors import CorpusError
from penstock.data.types import IGNORED_LABEL
from penstock.train.objective import DeviceBatch


def turns(rejected: Bool[Tensor, "batch seq"], cu_seqlens: Int[Tensor, "documents_plus_1"]) -> Tensor:
    """Return the flat positions of the last token of each chosen side: [pairs] int64.

    >>> rejected = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0]]).bool()
    >>> turns(rejected, torch.tensor([0, 6, 8])).tolist()
    [2]
    """
    flat = rejected.flatten().bool()
    before = torch.cat((flat.new_ones(1), flat[:-1]))
    before[cu_seqlens[:-1].long()] = True  # a document that begins with 1 is one answer that is not wanted
    return (flat & ~before).nonzero()[:, 0]


def split_pairs(part: DeviceBatch) -> DeviceBatch:
    """Return a micro-batch of whole rows with each side of a pair as a sequence of its own.

    Adds `segments` [batch, seq], the sequence of each token, and `chosen` [pairs], the sequence of each
    chosen side; the next one is its rejected side.
    """
    last = turns(part["rejected"], part["cu_seqlens"])
    labels = part["labels"].clone()
    labels.view(-1)[last] = IGNORED_LABEL
    ends = torch.cat((part["cu_seqlens"].long(), last + 1)).sort().values
    index = torch.arange(labels.numel(), device=labels.device)
    segments = torch.bucketize(index, ends, right=True) - 1
    positions = (index - ends[segments]).view_as(labels).to(part["position_ids"].dtype)
    rest = {name: value for name, value in part.items() if name != "rejected"}
    return {
        **rest,
        "labels": labels,
        "position_ids": positions,
        "cu_seqlens": ends.to(part["cu_seqlens"].dtype),
        "segments": segments.view_as(labels),
        "chosen": segments[last],
    }


def whole_sequences(part: DeviceBatch) -> DeviceBatch:
    """Return a micro-batch of whole rows of single answers.

    Adds `segments` [batch, seq], the document of each token; `examples` [n], the documents with a label; and
    `wanted` [documents], False if the answer is not wanted.
    """
    ends, labels = part["cu_seqlens"].long(), part["labels"]
    segments = torch.bucketize(torch.arange(labels.numel(), device=labels.device), ends, right=True) - 1
    num = len(ends) - 1
    learned, wanted = (torch.zeros(num, dtype=torch.bool, device=labels.device) for _ in range(2))
    learned[segments[(labels != IGNORED_LABEL).flatten()]] = True
    wanted[segments[part["rejected"].flatten().bool()]] = True
    rest = {name: value for name, value in part.items() if name != "rejected"}
    return {
        **rest,
        "segments": segments.view_as(labels),
        "examples": learned.nonzero()[:, 0],
        "wanted": ~wanted,
    }


def check_pairs(batch: DeviceBatch) -> None:
    """Refuse a batch with a learned conversation that is not part of a pair.

    Raises:
        CorpusError: with the number of such conversations.
    """
    pairs = turns(batch["rejected"], batch["cu_seqlens"])
    learned, in_pair = _documents_with(batch, batch["labels"] != IGNORED_LABEL, pairs)
    if wrong := int((learned & ~in_pair).sum()):
        raise CorpusError(
            f"A batch has {wrong:,} conversations without a rejected answer for the chosen one, and this "
            "loss compares pairs",
            got="single answers",
            fix="Prepare the corpus from pairs, each with a chosen and a rejected answer; or set tune.loss "
            "to 'kto' for single answers that are wanted or not.",
        )


def check_single(batch: DeviceBatch) -> None:
    """Refuse a batch with pairs.

    Raises:
        CorpusError: with their number.
    """
    if found := len(turns(batch["rejected"], batch["cu_seqlens"])):
        raise CorpusError(
            f"A batch has {found:,} pairs of a chosen and a rejected answer, and tune.loss 'kto' learns from "
            "single answers",
            got="pairs",
            fix="Set tune.loss to 'dpo', 'ipo' or 'simpo', or prepare the corpus from single answers with a "
            "thumb up or down.",
        )


def _documents_with(batch: DeviceBatch, learned: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each document of a batch whether it has a learned token, and whether it is a pair."""
    ends = batch["cu_seqlens"].long()
    of = torch.bucketize(torch.arange(learned.numel()), ends, right=True) - 1
    found = torch.zeros(len(ends) - 1, dtype=torch.bool), torch.zeros(len(ends) - 1, dtype=torch.bool)
    found[0][of[learned.flatten()]] = True
    found[1][of[pairs]] = True
    return found
