"""Rank batches: the partition of a step's rows over ranks, and reading those rows.

    quotas     each rank gets as many rows as the others, and its share of every corpus, rounded down or up
    homes      within the quotas a row goes to the rank that owns its lane: that rank keeps the pool open and
               fetches its blocks once
    balance    then rows are swapped between ranks, within the quotas, until the busiest rank has at most
               1.08 times the mean cost: the cost of a row is its attention pairs (see pool.py)

All of this is a function of the step (the corpora, lanes and costs of its rows) in integers. So every rank
computes the same partition without communication, whatever its threads and its machine. Few rows are swapped,
because a rank that reads a row of another rank's lane fetches its documents one by one.

The quotas can always be met: rows sorted by corpus and dealt in turn to the ranks meet them. A rank's own
rows, dealt in turn to its micro-batches, then give each of these its share rounded down or up, because
rounding a share twice is rounding it once.

The rows of several steps are located together, because a numpy call costs the same for one step as for many.
The result belongs to one sample index; a change of the run makes another, so nothing out of date is used. Row
costs are computed when a step is partitioned, since they require its pools to be packed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.arrays import Bool, Int32, Int64
from penstock.core.checks import check_divisible
from penstock.core.errors import ConfigError, TransformError
from penstock.data.collate import (
    FIELDS,
    BatchBuffers,
    CorpusSpans,
    collate,
    column_field,
    gather,
    mask_labels,
)
from penstock.data.corpus.columns import LEARNED
from penstock.data.corpus.corpus import Corpus
from penstock.data.native import library
from penstock.data.row_spans import RowSpans, StepSpans
from penstock.data.sample_index import SampleIndex
from penstock.data.schedule.segments import Located
from penstock.data.types import IGNORED_LABEL

if TYPE_CHECKING:
    from penstock.data.transform import Transform

Fields = dict[str, Int64 | Int32]


@dataclass(slots=True)
class ChosenSamples:
    """Samples to read, all of one sequence length, with their row addresses."""

    samples: Int64
    """[n] sample ids."""
    corpus: Int64
    """[n] indices of corpora."""
    addresses: Int64
    """[n, 4] entry, epoch, pool, row."""
    phase: int
    """Index of the sequence length."""
    at_home: Bool | None
    """[n] True if this rank reads most rows of the sample's pool; None: all True."""
    spans: StepSpans
    """Memory spans of the rows, for the compiled gather."""


class Reader:
    """Reader of one rank's batches. Thread-safe.

    Args:
        fields: fields to build.
        dtype: type of all fields but `sample_ids` and `cu_seqlens`.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        micro_rows: step -> rows of a micro-batch, each with every corpus in its share; None: one micro-batch.
        transform: applied to each row; None: no transform.
        seed: keys the random numbers of the transform.
    """

    def __init__(
        self,
        *,
        fields: tuple[str, ...],
        dtype: np.dtype[np.int64] | np.dtype[np.int32],
        rank: int,
        world_size: int,
        micro_rows: Callable[[int], int | None],
        transform: "Transform | None",
        seed: int,
    ) -> None:
        self.fields = fields
        self.dtype = dtype
        self.rank = rank
        self.world_size = world_size
        self._micro_rows = micro_rows
        self.transform = transform
        self._seed = seed
        self._buffers = BatchBuffers()
        self._shares: Shares | None = None  # rows located last
        self._columns = tuple(name for name in fields if name not in FIELDS)
        self._plain: SampleIndex | None = None  # one whose corpora have no columns
        if transform is not None and self._columns:
            raise ConfigError(
                "A transform moves tokens, so a column would not belong to them any more",
                got=", ".join(self._columns),
                fix="Leave out the transform, or these fields.",
            )

    def step(self, sample_index: SampleIndex, step: int) -> Fields:
        """Return this rank's batch of a step."""
        shares = self._shares
        if shares is None or shares.sample_index is not sample_index or step not in shares.steps:
            if shares is None or shares.sample_index is not sample_index:
                self.check(sample_index)
            shares = self._shares = shares_from(sample_index, step, world_size=self.world_size)
        chosen = shares.of(
            step, rank=self.rank, world_size=self.world_size, micro_rows=self._micro_rows(step)
        )
        return self._read(sample_index, chosen)

    def samples(self, sample_index: SampleIndex, samples: Int64) -> Fields:
        """Return a batch of samples [n] of one sequence length, in the order given."""
        return self._read(sample_index, locate(sample_index, samples))

    def _read(self, sample_index: SampleIndex, chosen: ChosenSamples) -> Fields:
        if self.transform is not None:
            return self._transformed(sample_index, chosen, self.transform)
        made = self._collate(sample_index, chosen, self.fields, self.dtype)
        return {"sample_ids": chosen.samples, **made}

    def _transformed(
        self, sample_index: SampleIndex, chosen: ChosenSamples, transform: "Transform"
    ) -> Fields:
        from penstock.data.transform import NEEDED_FIELDS, apply

        given = self._collate(sample_index, chosen, NEEDED_FIELDS, np.dtype(np.int64))
        batch = {"sample_ids": chosen.samples, **given}
        learned = (given["labels"] != IGNORED_LABEL).sum(axis=1)
        made = apply(batch, transform, seed=self._seed, fields=self.fields)
        self._check_learned(sample_index, chosen, before=learned, labels=batch["labels"])
        if self.dtype == np.int64:
            return made
        return {name: made[name] if name == "sample_ids" else _narrow(name, made[name]) for name in made}

    def _check_learned(
        self, sample_index: SampleIndex, chosen: ChosenSamples, *, before: Int64, labels: Int64 | Int32
    ) -> None:
        """Refuse a transform that labels more tokens of a row than the corpus's column `learned` allows.

        Raises:
            TransformError: with the sample.
        """
        if sample_index is self._plain:
            return
        masked = [LEARNED in sample_index.corpus(index).columns for index in range(len(sample_index.names))]
        more = np.array(masked)[chosen.corpus] & ((labels != IGNORED_LABEL).sum(axis=1) > before)
        if more.any():
            row = int(more.argmax())
            raise TransformError(
                f"The transform of sample {int(chosen.samples[row])} labels tokens that corpus "
                f"{sample_index.names[int(chosen.corpus[row])]!r} marks as not learned",
                fix="Leave its labels of -100 as they are: fill-in-the-middle is for plain text.",
            )

    def check(self, sample_index: SampleIndex) -> None:
        """Refuse corpora whose token ids do not fit the dtype, or whose columns do not make one field.

        Raises:
            ConfigError: with the corpus.
        """
        for source in sample_index.sources.values():
            self.check_corpus(source.name, source.corpus)
        for column in self._columns:
            if column != LEARNED:
                _check_alike(column, {s.name: s.corpus for s in sample_index.sources.values()})

    def check_corpus(self, name: str, corpus: Corpus) -> None:
        """Refuse a corpus as `check` does."""
        for column in self._columns:
            if column != LEARNED and column not in corpus.columns:
                raise ConfigError(
                    f"Corpus {name!r} has no column {column!r}",
                    got=", ".join(corpus.columns) or "no columns",
                    fix="Leave out the corpus or the field, or make the column.",
                )
        if self.dtype == np.int32 and (most := corpus.manifest.vocab_size) > 2**31:
            raise ConfigError(
                f"Corpus {name!r} may contain token ids up to {most - 1:,}, which do not fit int32",
                fix="Use dtype='int64', or declare its vocabulary: ',vocab_size=N'.",
            )

    def _collate(
        self, sample_index: SampleIndex, chosen: ChosenSamples, fields: Sequence[str], dtype: np.dtype[Any]
    ) -> Fields:
        """Read rows in one compiled pass, or else corpus by corpus with numpy; then their columns."""
        length, compiled = sample_index.length(chosen.phase), library()
        has_columns = self._has_columns(sample_index)
        if has_columns:
            fields = [name for name in fields if name in FIELDS]
            fields += ["labels"] if LEARNED in self._columns and "labels" not in fields else []
        made = parts = None
        if compiled is not None:
            made = gather(
                compiled, chosen.spans, length=length, fields=fields, buffers=self._buffers, dtype=dtype
            )
        if made is None or has_columns:
            parts = self._parts(sample_index, chosen)
        if made is None:
            assert parts is not None
            made = collate(parts, length=length, fields=fields, buffers=self._buffers, dtype=dtype)
        return made if parts is None or not has_columns else self._with_columns(made, parts, length=length)

    def _has_columns(self, sample_index: SampleIndex) -> bool:
        if sample_index is self._plain:
            return False
        if self._columns or any(source.corpus.columns for source in sample_index.sources.values()):
            return True
        self._plain = sample_index
        return False

    def _with_columns(self, made: Fields, parts: CorpusSpans, *, length: int) -> Fields:
        compiled = library()
        if "labels" in made:
            mask_labels(made["labels"], parts, compiled=compiled)
        for name in self._columns:
            if name == LEARNED:
                made[name] = made["labels"] != IGNORED_LABEL
            else:
                made[name] = column_field(
                    name, parts, length=length, buffers=self._buffers, compiled=compiled
                )
        if "labels" not in self.fields and self.transform is None:
            made.pop("labels", None)
        return made

    def _parts(self, sample_index: SampleIndex, chosen: ChosenSamples) -> CorpusSpans:
        """Return the piece tables of rows, corpus by corpus in batch order."""
        corpus = chosen.corpus
        edges = [0, len(corpus)]
        if len(sample_index.names) > 1:
            edges[1:1] = (np.flatnonzero(corpus[1:] != corpus[:-1]) + 1).tolist()
        parts = []
        for first, past in pairwise(edges):
            at_home = None if chosen.at_home is None else chosen.at_home[first:past]
            addresses = chosen.addresses[first:past]
            source, tables = sample_index.rows(int(corpus[first]), chosen.phase, addresses, at_home=at_home)
            parts.append((source.corpus, tables))
        return parts


def _check_alike(column: str, corpora: Mapping[str, Corpus]) -> None:
    """Refuse a column that is of another type or width in another corpus: a batch has rows of both.

    Raises:
        ConfigError: with both corpora.
    """
    (first, one), *rest = ((name, corpus.columns[column].entry) for name, corpus in corpora.items())
    for name, other in rest:
        if (one.dtype, one.width) != (other.dtype, other.width):
            raise ConfigError(
                f"Column {column!r} has {one.width} {one.dtype} a token in corpus {first!r}, and "
                f"{other.width} {other.dtype} in {name!r}",
                fix="Make the columns of all corpora with the same options.",
            )


def _narrow(name: str, values: Int64 | Int32) -> Int32:
    """Return a field made by a transform as int32.

    Raises:
        TransformError: a value does not fit.
    """
    limits = np.iinfo(np.int32)
    if values.size and (values.min() < limits.min or values.max() > limits.max):
        raise TransformError(
            f"The transform returned {name} that does not fit int32",
            got=int(np.abs(values).max()),
            fix="Use dtype='int64', or correct the transform.",
        )
    return values.astype(np.int32)


_LIMIT_PERCENT = 108  # of the mean; each percent less moves more rows away from their homes
_LIGHTEST = 8  # number of least busy ranks tried first for a swap
_SWAPS = 4  # at most, per rank; a step that needs more has few rows that fit elsewhere


def deal(corpora: Int64, homes: Int64, costs: Int64, *, world_size: int) -> Int64:
    """Return the rank of each row of a step: [n].

    Every rank gets n / world_size rows, and of each corpus its share rounded down or up.

    Args:
        corpora: [n] corpus of each row.
        homes: [n] preferred rank of each row.
        costs: [n] cost of each row in attention pairs, zero or more.


    >>> deal(np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1]), np.array([5, 5, 1, 1]), world_size=2).tolist()
    [0, 1, 0, 1]
    """
    if world_size == 1:
        return np.zeros_like(corpora)
    present, corpora = np.unique(corpora, return_inverse=True)
    counts = np.bincount(corpora)
    at_home = np.bincount(corpora * world_size + homes, minlength=len(present) * world_size)
    base = counts // world_size
    extra = _deal_extras(at_home.reshape(len(present), -1) > base[:, None], counts % world_size)
    ranks = _place(corpora, homes, quotas=base[:, None] + extra)
    loads = np.zeros(world_size, dtype=np.int64)
    np.add.at(loads, ranks, costs)
    dealt = _Dealt(corpora, costs, ranks, extra, loads)
    dealt.balance()
    return dealt.ranks


def homes_of(corpora: Int64, lanes: Int64, num_lanes: Int64, *, world_size: int) -> Int64:
    """Return the preferred rank of each row of a step: [n].

    Neighbouring lanes belong to different ranks, because a step takes a run of neighbouring lanes. If there
    are more ranks than lanes, several ranks share a lane.

    Args:
        corpora: [n] corpus of each row.
        lanes: [n] lane of its corpus.
        num_lanes: [n] number of lanes of its corpus.
    """
    turn = _count_before(lanes + corpora * (int(lanes.max()) + 1))  # among the step's rows of the lane
    sharing = -(-world_size // num_lanes)
    return np.asarray((corpora + lanes + turn % sharing * num_lanes) % world_size)


def is_home(corpora: Int64, lanes: Int64, num_lanes: Int64, *, rank: int, world_size: int) -> Bool:
    """Return True for rows of lanes that belong to a rank: [n]; arguments as for `homes_of`."""
    return np.asarray((rank - corpora - lanes) % world_size % num_lanes == 0)


def in_micro_batches(corpora: Int64, costs: Int64, *, rows: int) -> Int64:
    """Return the order [n] in which a rank computes its rows of a step.

    Each micro-batch holds every corpus within one row of its share. Costly rows come first: ranks wait for
    one another in each micro-batch, so their costly rows should coincide.

    Args:
        rows: rows of a micro-batch; if it does not divide n, their greatest common divisor is used.


    >>> in_micro_batches(np.array([0, 0, 1, 1]), np.array([1, 9, 1, 9]), rows=2).tolist()
    [1, 3, 0, 2]
    """
    num = len(corpora) // math.gcd(len(corpora), rows)
    if num == 1:
        return np.arange(len(corpora))
    return np.lexsort((-costs, corpora)).reshape(-1, num).T.reshape(-1)


def _deal_extras(wanted: Bool, counts: Int64) -> Bool:
    """Choose the ranks that get one row more than the rounded-down share: [corpora, ranks].

    Args:
        wanted: [corpora, ranks] True where an extra row is preferred.
        counts: [corpora] number of ranks with an extra row, fewer than all; every rank gets equally many
            extras.
    """
    corpora, ranks = np.nonzero(wanted)
    few = _count_before(corpora) < counts[corpora]
    corpora, ranks = corpora[few], ranks[few]
    each = int(counts.sum()) // wanted.shape[1]
    few = _count_before(ranks) < each
    extra = np.zeros_like(wanted)
    extra[corpora[few], ranks[few]] = True
    given = extra.sum(axis=0)
    missing = counts - extra.sum(axis=1)
    for corpus in np.repeat(np.arange(len(counts)), missing).tolist():
        free = np.flatnonzero(~extra[corpus] & (given < each))
        if len(free):
            rank = int(free[given[free].argmin()])
        else:  # every rank with room already has this corpus: move another corpus's extra row to it
            room, rank = int(given.argmin()), int(extra[corpus].argmin())
            other = int((extra[:, rank] & ~extra[:, room]).argmax())
            extra[other, rank], extra[other, room] = False, True
            given[rank] -= 1
            given[room] += 1
        extra[corpus, rank] = True
        given[rank] += 1
    return extra


def _place(corpora: Int64, homes: Int64, *, quotas: Int64) -> Int64:
    """Return the rank of each row [n]: its home while there is room, else the next rank with room.

    Args:
        quotas: [corpora, ranks] number of rows.
    """
    world_size = quotas.shape[1]
    cell = corpora * world_size + homes
    stays = _count_before(cell) < quotas.reshape(-1)[cell]
    ranks = np.where(stays, homes, -1)
    room = quotas.reshape(-1) - np.bincount(cell[stays], minlength=quotas.size)
    left = np.flatnonzero(~stays)
    left = left[np.argsort(corpora[left], kind="stable")]
    ranks[left] = np.repeat(np.arange(quotas.size), room) % world_size
    return ranks


@dataclass(frozen=True, slots=True)
class _Dealt:
    """Assignment of the rows of a step to ranks, and its improvement by swaps."""

    corpora: Int64
    """[n] corpus of each row, numbered without gaps."""
    costs: Int64
    """[n] cost of each row."""
    ranks: Int64
    """[n] rank of each row."""
    extra: Bool
    """[corpora, ranks] True if the rank has one row more of the corpus than its rounded-down share."""
    loads: Int64
    """[ranks] sum of the costs of a rank's rows."""

    def balance(self) -> None:
        """Swap rows until the busiest rank is within the limit, or no swap helps."""
        world_size = len(self.loads)
        limit = int(self.loads.sum()) * _LIMIT_PERCENT // (100 * world_size)
        for _ in range(_SWAPS * world_size):
            order = np.argsort(self.loads, kind="stable")
            busiest = int(order[-1])
            if self.loads[busiest] <= limit:
                return
            found = self._best_swap(busiest, order[:_LIGHTEST], limit=limit)
            found = found or self._best_swap(busiest, order[:-1], limit=limit)
            if found is None:
                return
            self._swap(*found)

    def _best_swap(self, busiest: int, partners: Int64, *, limit: int) -> tuple[int, int] | None:
        """Return a row of the busiest rank and one of a partner to swap; None if no swap helps.

        Chooses the swap that lowers the higher of both loads most; among those that bring it within the
        limit, the one with the costliest rows: they hold the fewest documents, which are fetched one by one.
        The quotas allow a swap of two rows of one corpus, or of two extra rows that the other rank does not
        have.
        """
        own, others = np.flatnonzero(self.ranks == busiest), np.flatnonzero(np.isin(self.ranks, partners))
        ours, theirs, elsewhere = self.corpora[own][:, None], self.corpora[others], self.ranks[others]
        spare = self.extra[ours, busiest] & ~self.extra[ours, elsewhere]
        wanted = self.extra[theirs, elsewhere] & ~self.extra[theirs, busiest]
        gain = self.costs[own][:, None] - self.costs[others]
        higher = np.maximum(self.loads[busiest] - gain, self.loads[elsewhere] + gain)
        higher[~((ours == theirs) | (spare & wanted))] = self.loads[busiest]
        within = higher <= limit
        both = self.costs[own][:, None] + self.costs[others]
        best = divmod(int((np.where(within, both, -1) if within.any() else -higher).argmax()), len(others))
        return (int(own[best[0]]), int(others[best[1]])) if higher[best] < self.loads[busiest] else None

    def _swap(self, one: int, other: int) -> None:
        """Swap two rows."""
        for row, old, new in (
            (one, self.ranks[one], self.ranks[other]),
            (other, self.ranks[other], self.ranks[one]),
        ):
            self.ranks[row] = new
            self.loads[old] -= self.costs[row]
            self.loads[new] += self.costs[row]
            if self.corpora[one] != self.corpora[other]:
                self.extra[self.corpora[row], old], self.extra[self.corpora[row], new] = False, True


def _count_before(values: Int64) -> Int64:
    """Return how many equal values precede each of values [n].

    >>> _count_before(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    index = np.arange(len(values))
    starts = np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(values)]
    before = np.empty_like(index)
    before[order] = index - np.maximum.accumulate(np.where(starts, index, 0))
    return before


_AT_ONCE = 2048  # samples located together: half a millisecond


@dataclass(frozen=True, slots=True)
class Shares:
    """Located rows of several steps, by corpus and lane; arrays as in ChosenSamples, steps as first axis."""

    sample_index: SampleIndex
    steps: range
    samples: Int64
    corpus: Int64
    addresses: Int64
    lanes: Int64
    """[steps, n] lane of the row's corpus."""
    phase: int
    spans: RowSpans

    def of(self, step: int, *, rank: int, world_size: int, micro_rows: int | None = None) -> ChosenSamples:
        """Return the samples that a rank reads in one of the steps, in the order in which it computes them.

        The array of ids is a copy.

        Args:
            micro_rows: rows of a micro-batch; None: one micro-batch.
        """
        index = step - self.steps.start
        corpus, addresses = self.corpus[index], self.addresses[index]
        if world_size == 1 and micro_rows is None:
            samples = self.samples[index].copy()
            return ChosenSamples(samples, corpus, addresses, self.phase, None, self.spans.step(index))
        lanes = self.lanes[index]
        num_lanes = self.sample_index.num_lanes(corpus, self.phase, addresses)
        costs = np.zeros_like(corpus)
        at_home = is_home(corpus, lanes, num_lanes, rank=rank, world_size=world_size)
        if 1 < world_size < len(corpus):  # otherwise no row can be swapped
            costs = self.sample_index.attention_pairs(corpus, self.phase, addresses, at_home=at_home)
        homes = homes_of(corpus, lanes, num_lanes, world_size=world_size)
        mine = np.flatnonzero(deal(corpus, homes, costs, world_size=world_size) == rank)
        mine = mine[in_micro_batches(corpus[mine], costs[mine], rows=micro_rows or len(mine))]
        return ChosenSamples(
            self.samples[index, mine],
            corpus[mine],
            addresses[mine],
            self.phase,
            at_home[mine],
            self.spans.step(index, mine),
        )


def locate(sample_index: SampleIndex, samples: Int64) -> ChosenSamples:
    """Return samples [n] of one sequence length with their addresses, in the order given."""
    located = sample_index.locate(samples)
    addresses, _ = _addresses(sample_index, located)
    spans = _spans(sample_index, located.phase, located.corpus[None], addresses[None])
    return ChosenSamples(samples, located.corpus, addresses, located.phase, None, spans.step(0))


def shares_from(sample_index: SampleIndex, step: int, *, world_size: int) -> Shares:
    """Return the located rows of a step, and of as many following steps as fit one lookup.

    Raises:
        ConfigError: the step's batch size is not divisible by the ranks; a past step may have had another
            size.
    """
    size = sample_index.change_log.batch_size_at(step)
    check_divisible(size, world_size=world_size)
    steps = sample_index.change_log.steps_alike(step, most=max(1, _AT_ONCE // size))
    samples = sample_index.change_log.samples_in(steps)
    located = sample_index.locate(samples)
    if not sample_index.holds(located):  # later steps may wait for data or raise errors of their own
        steps, samples = steps[:1], samples[:size]
        located = sample_index.locate(samples)
    addresses, lanes = _addresses(sample_index, located)
    in_steps = len(steps), size
    order = np.lexsort((lanes.reshape(in_steps), located.corpus.reshape(in_steps)))  # along the last axis
    order += np.arange(0, len(samples), size)[:, None]
    corpus, addresses = located.corpus[order], addresses[order]
    spans = _spans(sample_index, located.phase, corpus, addresses)
    return Shares(sample_index, steps, samples[order], corpus, addresses, lanes[order], located.phase, spans)


def _spans(sample_index: SampleIndex, phase: int, corpus: Int64, addresses: Int64) -> RowSpans:
    return RowSpans(
        corpus,
        addresses,
        lambda number, pool_key: sample_index.spans(number, phase, pool_key),
        lambda number, pool_key: sample_index.read_ahead(number, phase, pool_key),
    )


def _addresses(sample_index: SampleIndex, located: Located) -> tuple[Int64, Int64]:
    entries, addresses = sample_index.addresses(located)
    return np.stack((entries, addresses.epoch, addresses.pool, addresses.row), axis=1), addresses.lane
