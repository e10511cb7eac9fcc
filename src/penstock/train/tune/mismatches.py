"""Mismatched answers of KTO: each a prompt with the answer to another, and what the reference makes of them.

TRL pairs the examples of each device's batch by turning their answers by one, so its divergence depends on
the number of devices. Here:

    partner   of document i is the nearest document before it with another prompt (around the end of the
              corpus), so it is a fact of the corpus. TRL's, if the batch is the corpus and prompts differ.
    prompt    all tokens before the first learned one; the rest is the answer. Prompt and answer together
              are cut at the length of a row.

Since partners do not change, their reference log-probabilities are computed once, as those of the examples.
"""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core.arrays import Float64, Int64
from penstock.core.errors import CorpusError
from penstock.core.files import locked, write_atomic
from penstock.core.log import EventLog
from penstock.data.corpus.columns import LEARNED
from penstock.data.corpus.corpus import Corpus
from penstock.data.packing import whole
from penstock.data.types import IGNORED_LABEL
from penstock.nn.head import OutputHead
from penstock.parallel.collectives import CollectiveGroup
from penstock.train.objective import DeviceBatch, Finish
from penstock.train.step import loss_sum, micro_batches
from penstock.train.tune.corpus_pass import Pass
from penstock.train.tune.pairs import whole_sequences
from penstock.train.tune.preference import answer_sums, num_slices
from penstock.train.tune.reference import mismatched_file

log = EventLog(__name__)

_AT_ONCE = 1024
"""Examples whose sequences a rank holds at once."""

TokensAndLabels = tuple[Int64, Int64]


class Examples:
    """Documents of a corpus as prompts and answers.

    Raises:
        CorpusError: the corpus does not say which tokens are learned.
    """

    def __init__(self, corpus: Corpus) -> None:
        if LEARNED not in corpus.columns:
            raise CorpusError(
                f"{corpus.location} does not say which tokens are learned, so no prompt ends in it",
                fix="Prepare it from conversations.",
            )
        self._corpus = corpus
        documents = corpus.fragments([(0, corpus.num_tokens)])
        self._starts, self._lengths = documents.starts, documents.lengths
        self._shards = {corpus.shard_name(shard): shard for shard in range(len(corpus.manifest.shards))}

    def __len__(self) -> int:
        return len(self._starts)

    def number_at(self, shard: str, start: int) -> int:
        """Return the number of the document, empty ones not counted, at a token of a shard."""
        position = int(self._corpus.starts[self._shards[shard]]) + start
        return int(np.searchsorted(self._starts, position, side="right")) - 1

    def document(self, number: int) -> tuple[Int64, np.ndarray[tuple[int], np.dtype[np.bool_]], int]:
        """Return the tokens of a document, which of them are learned, and the length of its prompt."""
        start, length = int(self._starts[number]), int(self._lengths[number])
        (shard,), (inside,) = self._corpus.locate(np.array([start]))
        learned = self._corpus.columns[LEARNED].values(int(shard), int(inside), int(inside) + length)
        tokens = self._corpus.tokens(start, start + length).astype(np.int64)
        return tokens, learned, int(learned.argmax()) if learned.any() else length

    def mismatched(self, number: int, partner: int, *, length: int) -> TokensAndLabels:
        """Return a document's prompt with another's answer, cut at `length`, and its labels."""
        own, _, prompt = self.document(number)
        other, learned, first = self.document(partner)
        tokens = np.concatenate((own[:prompt], other[first:]))[:length]
        keep = np.concatenate((np.zeros(prompt, np.bool_), learned[first:]))[:length]
        labels = np.full(len(tokens), IGNORED_LABEL)
        labels[:-1] = np.where(keep[1:], tokens[1:], IGNORED_LABEL)
        return tokens, labels

    def partners(self) -> Int64:
        """Return the number of each document's partner: [documents]."""
        prompts = []
        for number in range(len(self)):
            tokens, _, prompt = self.document(number)
            prompts.append(
                hashlib.blake2b(tokens[:prompt].tobytes(), digest_size=16).digest()
            )  # not 8 B a token
        return partners_of(prompts)


def partners_of(prompts: Sequence[bytes]) -> Int64:
    """Return for each prompt the nearest one before it, around the end, that differs; else the one before.

    >>> partners_of([b"a", b"a", b"b", b"c"]).tolist(), partners_of([b"a", b"a"]).tolist()
    ([3, 3, 1, 2], [1, 0])
    """
    found = np.arange(-1, len(prompts) - 1) % len(prompts)
    for i, (before, prompt) in enumerate(pairwise(prompts), start=1):
        if before == prompt:
            found[i] = found[i - 1]
    begin = next((i for i, prompt in enumerate(prompts) if prompt != prompts[0]), 0)  # equal ones before
    last = next((i for i in reversed(range(len(prompts))) if prompts[i] != prompts[0]), None)
    if last is None:
        return np.arange(-1, len(prompts) - 1) % len(prompts)
    found[:begin] = last
    return found


@dataclass(frozen=True, slots=True)
class Mismatches:
    """Partners of a corpus's examples, and what the reference model makes of them."""

    examples: Examples
    partners: Int64
    """[documents]."""
    reference: Float64
    """[documents] log-probability of the partner's answer after the document's prompt."""


def mismatched_log_probs(
    of: Pass, sequences: Sequence[TokensAndLabels], *, length: int, slices: CollectiveGroup | None
) -> Tensor:
    """Return the log-probability of the labels of each of this rank's sequences: [n] float64.

    Every rank must call it; ranks without the last pipeline stage return 0.

    Args:
        sequences: of this rank's share; ranks that work on the same rows give the same.
    """
    tables = _packed([len(tokens) for tokens, _ in sequences], length=length)
    passes = round(of.world.most(-(-len(tables) // of.rows)))
    found = torch.zeros(len(sequences), dtype=torch.float64, device=of.world.device)
    was_training = of.model.training
    of.model.eval()
    for first in range(0, passes * of.rows, of.rows):
        rows = [tables[row] if row < len(tables) else [] for row in range(first, first + of.rows)]
        batch, numbers, at = _batch(sequences, rows, length=length)
        (part,) = micro_batches(
            batch,
            rows=of.rows,
            device=of.world.device,
            sequence_slice=of.slice_of(length),
            fields=("rejected",),
            prepare=whole_sequences,
        )
        sums: list[Tensor] = []
        with torch.no_grad():
            loss_sum(of.model, part, _keeping_sums(sums, part, slices))
        if sums:
            found[numbers] = sums[0][at]
    of.model.train(was_training)
    return found


def _keeping_sums(sums: list[Tensor], part: DeviceBatch, slices: CollectiveGroup | None) -> Finish:
    def finish(hidden: Tensor, head: OutputHead) -> Tensor:
        sums.append(answer_sums(hidden, head, part, slices).log_probs)
        return hidden.new_zeros((), dtype=torch.float32)

    return finish


def _packed(lengths: Sequence[int], *, length: int) -> list[list[int]]:
    """Return the numbers of the sequences in each row."""
    if not lengths:
        return []
    packed = whole.pack(np.array(lengths, dtype=np.int64), num_rows=0, sequence_length=length)
    return [row.tolist() for row in np.split(packed.fragment, packed.row_ends[:-1])]


def _batch(
    sequences: Sequence[TokensAndLabels], rows: Sequence[Sequence[int]], *, length: int
) -> tuple[DeviceBatch, list[int], list[int]]:
    """Return a batch of sequences in rows, their numbers, and their segments in the batch."""
    ids = np.zeros((len(rows), length), dtype=np.int64)
    labels, positions = np.full_like(ids, IGNORED_LABEL), np.zeros_like(ids)
    ends, numbers, at = [0], [], []
    for row, inside in enumerate(rows):
        start = 0
        for number in [*inside, -1]:
            tokens, of = sequences[number] if number >= 0 else (ids[row, start:], labels[row, start:])
            stop = start + len(tokens)
            ids[row, start:stop], labels[row, start:stop] = tokens, of
            positions[row, start:stop] = np.arange(len(tokens))
            if number >= 0:
                numbers.append(number)
                at.append(len(ends) - 1)
            if stop > start:
                ends.append(row * length + stop)
            start = stop
    batch = {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
        "position_ids": torch.from_numpy(positions),
        "cu_seqlens": torch.tensor(ends, dtype=torch.int32),
        "rejected": torch.zeros(ids.shape, dtype=torch.bool),
    }
    return batch, numbers, at


def mismatches_of(
    corpora: Mapping[str, Corpus],
    model: Mapping[str, object],
    of: Pass,
    *,
    length: int,
    slices: CollectiveGroup | None,
) -> dict[str, Mismatches]:
    """Return the mismatched examples of each corpus; every rank must call it, as `reference_columns`."""
    found = {}
    for name, corpus in corpora.items():
        file, examples = mismatched_file(corpus, model, length=length), Examples(corpus)
        if of.world.most(not file.is_file()):
            if of.world.is_first:
                log.info(
                    "mismatches",
                    "Computing the reference of mismatched answers of corpus {corpus!r} once: "
                    "{examples:,} examples",
                    corpus=name,
                    examples=len(examples),
                )
            table = _computed(examples, of, length=length, slices=slices)
            if of.world.ranks.local_rank == 0:
                _write(file, table)
            dist.barrier()
        partners, reference = np.load(file, allow_pickle=False)
        found[name] = Mismatches(examples, partners.astype(np.int64), reference)
    return found


def _computed(
    examples: Examples, of: Pass, *, length: int, slices: CollectiveGroup | None
) -> "np.ndarray[tuple[int, int], np.dtype[np.float64]]":
    partners = examples.partners()
    reference = torch.zeros(len(examples), dtype=torch.float64, device=of.world.device)
    for first in range(0, len(examples), _AT_ONCE * of.parts):
        mine = range(first + of.part, min(first + _AT_ONCE * of.parts, len(examples)), of.parts)
        sequences = [examples.mismatched(n, int(partners[n]), length=length) for n in mine]
        found = mismatched_log_probs(of, sequences, length=length, slices=slices)
        if of.gives:
            reference[list(mine)] = found / num_slices(slices)
        of.check_stop()
    dist.all_reduce(reference)
    return np.stack((partners.astype(np.float64), reference.cpu().numpy()))


def _write(file: Path, table: "np.ndarray[tuple[int, int], np.dtype[np.float64]]") -> None:
    content = io.BytesIO()
    np.save(content, table, allow_pickle=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.with_name(f"{file.name}.lock")):  # another job, or a machine that shares the folder
        if not file.is_file():
            write_atomic(file, content.getvalue())
