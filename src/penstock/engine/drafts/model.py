"""Drafts from a small model with the same tokens, which keeps pace with the large one block for block.

The small model has pages of its own under the same block numbers. After every step it computes what the
large model computed and kept, into the same slots: so whatever the large model finds in its blocks (a
shared prompt, a sequence that comes back) the small one finds in its own, and there is neither a second
allocator nor a second account of what is valid.

In the same pass it computes the token just drawn, and from there guesses one token at a time. The slots
behind the kept tokens are the sequence's own, or not there yet: then they are taken from spare blocks
that no sequence holds. What a guess leaves in either is written again before it is read.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.drafts.drafter import Done
from penstock.engine.scheduling.sequence import Sequence

Logits = Callable[[Batch], Tensor]
"""Runs the small model; returns the logits [r, vocab] of the rows that the batch asks for."""


def num_spare_blocks(*, num_drafts: int, block_size: int, max_sequences: int) -> int:
    """Return how many blocks a small model's pages need beyond those of the large one.

    >>> num_spare_blocks(num_drafts=4, block_size=16, max_sequences=10)
    10
    """
    return max_sequences * _spare_of_one(num_drafts, block_size)


def _spare_of_one(num_drafts: int, block_size: int) -> int:
    # the token just drawn and the guesses but the last, behind a last block that is full
    return -(-num_drafts // block_size)


@dataclass(slots=True)
class _Run:
    """Tokens of one sequence to compute, from a position on, in the blocks of a table."""

    share: int
    tokens: list[int]
    start: int
    table: list[int]


class ModelDrafter:
    """Guesses the likeliest continuation under a smaller model.

    Args:
        logits: runs it; its pages have the spare blocks behind `num_blocks`.
        num_blocks: of the large model's pages.
        vocab_size: of the large model: what only the small one knows is not guessed.
        context: positions that the small model was made for; none is computed or guessed beyond.
        num_drafts: at most so many are wanted of a sequence.
    """

    def __init__(
        self,
        logits: Logits,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        context: int,
        num_drafts: int,
    ) -> None:
        self._logits = logits
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._context = context
        self._spare = _spare_of_one(num_drafts, block_size)

    def propose(self, done: Done, wanted: Many[int]) -> list[tuple[int, ...]]:
        """Return guesses; see `Drafter`."""
        lengths = [len(share.sequence.tokens) for share in done.plan.shares]
        wanted = [num if length <= self._context else 0 for num, length in zip(wanted, lengths, strict=True)]
        runs = self._following(done, wanted)
        found: list[list[int]] = [[] for _ in wanted]
        while runs:
            for run, token in zip(runs, self._likeliest(runs), strict=True):
                if wanted[run.share]:
                    found[run.share].append(token)
            runs = [
                _Run(run.share, found[run.share][-1:], run.start + len(run.tokens), run.table)
                for run in runs
                if self._goes_on(run, num_found=len(found[run.share]), num_wanted=wanted[run.share])
            ]
        return [tuple(tokens) for tokens in found]

    def forget(self, sequence: Sequence) -> None:
        """Nothing is kept of a sequence but what is in its blocks."""

    def _goes_on(self, run: _Run, *, num_found: int, num_wanted: int) -> bool:
        return num_found < num_wanted and run.start + len(run.tokens) < self._context

    def _following(self, done: Done, wanted: Many[int]) -> list[_Run]:
        """Return what the large model computed and kept, and the new last token where drafts are wanted."""
        runs, spare = [], self._num_blocks
        for index, (share, kept) in enumerate(zip(done.plan.shares, done.num_kept, strict=True)):
            first = int(done.batch.query_starts[index])
            tokens = done.batch.token_ids[first : first + kept].tolist()
            num_held = -(-(share.start + share.num_tokens) // self._block_size)
            table = done.batch.block_tables[index, :num_held].tolist()
            if wanted[index]:
                tokens.append(done.drawn[index][-1])
                table += range(spare, spare + self._spare)
                spare += self._spare
            if known := tokens[: max(0, self._context - share.start)]:
                runs.append(_Run(index, known, share.start, table))
        return sorted(runs, key=lambda run: len(run.tokens) > 1)  # single tokens come first in a batch

    @torch.inference_mode()
    def _likeliest(self, runs: Many[_Run]) -> list[int]:
        """Compute runs; return the token that most likely follows each."""
        logits = self._logits(_batch(runs, self._block_size))
        likeliest: list[int] = logits[:, : self._vocab_size].argmax(-1).tolist()
        return likeliest


def _batch(runs: Many[_Run], block_size: int) -> Batch:
    sizes = np.array([len(run.tokens) for run in runs])
    starts = np.array([run.start for run in runs])
    ends = np.cumsum(sizes)
    tables = np.zeros((len(runs), max(len(run.table) for run in runs)), dtype=np.int32)
    for row, run in zip(tables, runs, strict=True):
        row[: len(run.table)] = run.table
    positions = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes) + np.repeat(starts, sizes)
    blocks = tables[np.repeat(np.arange(len(runs)), sizes), positions // block_size].astype(np.int64)
    return Batch(
        token_ids=np.array([token for run in runs for token in run.tokens], dtype=np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        query_starts=np.concatenate(([0], ends)).astype(np.int32),
        lengths=(starts + sizes).astype(np.int32),
        block_tables=tables,
        logit_rows=ends - 1,
        adapters=np.full(len(runs), -1, dtype=np.int32),
    )
