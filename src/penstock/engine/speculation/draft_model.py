"""Draft model: a small model with the same vocabulary, kept in step with the large one block for block.

The draft model has its own pages under the same block numbers. After every step it computes the tokens that
the large model computed and kept, into the same slots. So whatever the large model finds in its blocks (a
shared prompt, a resumed sequence) the draft model finds in its own, without a second allocator or a second
record of valid positions.

In the same pass it computes the token just sampled, then drafts one token at a time. Slots after the kept
tokens belong to the sequence, or do not exist yet: then spare blocks that no sequence holds are used. Drafted
entries in either are overwritten before they are read.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.scheduling.sequence import Sequence
from penstock.engine.speculation.speculation import CompletedStep, known_tokens

Logits = Callable[[StepBatch], Tensor]
"""Runs the draft model; returns the logits [r, vocab] of `StepBatch.logit_rows`."""


def num_spare_blocks(*, num_drafts: int, block_size: int, max_sequences: int) -> int:
    """Return how many blocks the draft model's pages need beyond those of the large one.

    >>> num_spare_blocks(num_drafts=4, block_size=16, max_sequences=10)
    10
    """
    return max_sequences * _spare_of_one(num_drafts, block_size)


def _spare_of_one(num_drafts: int, block_size: int) -> int:
    # the token just sampled and all drafts but the last, after a full last block
    return -(-num_drafts // block_size)


@dataclass(slots=True)
class _DraftRows:
    """Consecutive tokens of one sequence to compute, and their block table."""

    share: int
    tokens: list[int]
    start: int
    table: list[int]


class ModelDrafter:
    """Drafts the likeliest continuation under a smaller model.

    Args:
        logits: runs the draft model; its pages have the spare blocks after `num_blocks`.
        num_blocks: blocks of the large model's pages.
        vocab_size: of the large model: further tokens of the draft model are not drafted.
        context: positions of the draft model; nothing is computed or drafted beyond.
        num_drafts: maximum drafts per sequence.
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

    def propose(self, done: CompletedStep, wanted: Many[int]) -> list[tuple[int, ...]]:
        """Return drafts; see `Drafter`."""
        lengths = [len(share.sequence.tokens) for share in done.plan.shares]
        wanted = [num if length <= self._context else 0 for num, length in zip(wanted, lengths, strict=True)]
        runs = self._following(done, wanted)
        found: list[list[int]] = [[] for _ in wanted]
        while runs:
            for run, token in zip(runs, self._likeliest(runs), strict=True):
                if wanted[run.share]:
                    found[run.share].append(token)
            runs = [
                _DraftRows(run.share, found[run.share][-1:], run.start + len(run.tokens), run.table)
                for run in runs
                if self._goes_on(run, num_found=len(found[run.share]), num_wanted=wanted[run.share])
            ]
        return [tuple(tokens) for tokens in found]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: all state of a sequence is in its blocks."""

    def _goes_on(self, run: _DraftRows, *, num_found: int, num_wanted: int) -> bool:
        return num_found < num_wanted and run.start + len(run.tokens) < self._context

    def _following(self, done: CompletedStep, wanted: Many[int]) -> list[_DraftRows]:
        """Return the tokens that the large model kept, plus the new last token where drafts are wanted."""
        runs, spare = [], self._num_blocks
        for index, (share, kept) in enumerate(zip(done.plan.shares, done.num_kept, strict=True)):
            first = int(done.batch.query_starts[index])
            tokens = done.batch.token_ids[first : first + kept].tolist()
            num_held = -(-(share.start + share.num_tokens) // self._block_size)
            table = done.batch.block_tables[index, :num_held].tolist()
            if wanted[index]:
                tokens.append(done.sampled[index][-1])
                table += range(spare, spare + self._spare)
                spare += self._spare
            if fitting := tokens[: max(0, self._context - share.start)]:
                runs.append(_DraftRows(index, known_tokens(fitting, self._vocab_size), share.start, table))
        return sorted(runs, key=lambda run: len(run.tokens) > 1)  # single tokens first, as batches need

    @torch.inference_mode()
    def _likeliest(self, runs: Many[_DraftRows]) -> list[int]:
        """Compute runs; return the likeliest next token of each."""
        logits = self._logits(_batch(runs, self._block_size))
        likeliest: list[int] = logits[:, : self._vocab_size].argmax(-1).tolist()
        return likeliest


def _batch(runs: Many[_DraftRows], block_size: int) -> StepBatch:
    sizes = np.array([len(run.tokens) for run in runs])
    starts = np.array([run.start for run in runs])
    ends = np.cumsum(sizes)
    tables = np.zeros((len(runs), max(len(run.table) for run in runs)), dtype=np.int32)
    for row, run in zip(tables, runs, strict=True):
        row[: len(run.table)] = run.table
    positions = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes) + np.repeat(starts, sizes)
    blocks = tables[np.repeat(np.arange(len(runs)), sizes), positions // block_size].astype(np.int64)
    return StepBatch(
        token_ids=np.array([token for run in runs for token in run.tokens], dtype=np.int64),
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        query_starts=np.concatenate(([0], ends)).astype(np.int32),
        lengths=(starts + sizes).astype(np.int32),
        block_tables=tables,
        logit_rows=ends - 1,
        adapters=np.full(len(runs), -1, dtype=np.int32),
    )
