"""Steps to batches: the public loader.

Everything a step holds is a function of (corpora, seed, what the run was told, step): `batch_at` may be
called for any step on any rank at any time. Iteration only counts steps, and the count is the state. The
loader knows ranks only as arguments of who computes what.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import ConfigError, UsageError
from penstock.data.arguments import at_least, check_fields, delivery, sample_ids, whole_number
from penstock.data.assign import check_divisible
from penstock.data.corpus import Corpus
from penstock.data.feed import Feed, ProcessFeed, ThreadFeed
from penstock.data.holdout import Split
from penstock.data.reader import Reader
from penstock.data.run import Run, Snapshot
from penstock.data.schedule import Change
from penstock.data.state import State
from penstock.data.tally import (
    LengthChange,
    length_changes,
    samples_by_corpus,
    tokens_by_corpus,
    waste_by_corpus,
)
from penstock.data.timeline import MOST_LENGTH
from penstock.data.trace import Piece, Use, explain, find
from penstock.data.transform import Transform, name_of
from penstock.data.types import Batch, Int32, Int64, Waste


class Loader:
    """An iterable of batches that resumes exactly on any number of ranks.

    Each batch is a dict of this rank's share of one step: `sample_ids` [local_batch] int64 always,
    and the requested fields: `input_ids`, `labels`, `position_ids`, `document_ids`
    [local_batch, sequence_length] int64, `cu_seqlens` [documents + 1] int32 (see collate.py).

    Iteration goes on for ever, epoch after epoch, from wherever the state is; a new `iter()` continues,
    it does not start again. Closing an iterator, or dropping it, ends its threads.

    Args:
        corpora: name -> corpus folder or address. The names key the order and the state; the paths do not.
        weights: share of samples by name, need not sum to one; None: in proportion to tokens.
        sequence_length: tokens per row.
        global_batch_size: rows per step over all ranks; a multiple of `world_size`.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        seed: keys every permutation.
        packing: rule that places documents into rows, a name in PACKERS.
        overlong: with packing "whole", what to do with a document longer than a row: "truncate" or "drop".
        fields: which fields to build; each costs its memory traffic.
        epochs: name -> largest number of passes over that corpus; absent: no cap.
        split: "train", or "heldout" for the part that training never sees.
        holdout: share of each corpus that is held out for validation.
        num_workers: threads that prepare batches ahead; 0 for none. Changes nothing but speed.
        prefetch: batches prepared ahead.
        deliver: "torch" for CPU tensors, "pinned" for page-locked ones, "numpy" for arrays.
        schedule: changes of weights, batch size or sequence length that are planned from the start.
        transform: function of (sample, generator keyed by its id); see transform.py.
        transform_processes: processes that apply it; 0: the loader's threads do.

    Raises:
        CorpusError: a corpus is missing or damaged.
        ConfigError: an argument is out of range or names no corpus.
    """

    def __init__(
        self,
        corpora: Mapping[str, str | Path],
        *,
        weights: Mapping[str, float] | None = None,
        sequence_length: int,
        global_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        packing: str = "best_fit",
        overlong: str | None = None,
        fields: Sequence[str] = ("input_ids", "labels"),
        epochs: Mapping[str, int] | None = None,
        split: Split = "train",
        holdout: float = 0.0,
        num_workers: int = 1,
        prefetch: int = 2,
        deliver: str = "torch",
        schedule: Sequence[Change] = (),
        transform: Transform | None = None,
        transform_processes: int = 0,
    ) -> None:
        self._run = Run(
            corpora,
            weights=weights,
            sequence_length=sequence_length,
            global_batch_size=global_batch_size,
            seed=seed,
            packing=packing,
            overlong=overlong,
            epochs=epochs or {},
            split=split,
            holdout=holdout,
            schedule=schedule,
        )
        self._num_workers = at_least(0, "num_workers", num_workers, most=1024)
        self._prefetch = at_least(0, "prefetch", prefetch, most=1024)
        rank, world_size = whole_number("rank", rank), whole_number("world_size", world_size)
        planned = [change.global_batch_size for change in self._run.arguments["schedule"]]
        for size in (global_batch_size, *filter(None, planned)):
            check_divisible(size, world_size=world_size)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size})", got=rank)
        self._reader = Reader(
            fields=check_fields(fields), rank=rank, world_size=world_size, transform=transform, seed=seed
        )
        self._processes = at_least(0, "transform_processes", transform_processes, most=1024)
        self._deliver = delivery(deliver)
        self._delivers = deliver
        self._changes = 0

    @property
    def step(self) -> int:
        """Batches handed out so far: the step the next one belongs to."""
        return self._run.step

    @property
    def corpora(self) -> dict[str, Corpus]:
        """The corpora by name."""
        return {name: source.corpus for name, source in self._run.sources.items()}

    @property
    def num_samples(self) -> int | None:
        """Samples, skipped ones too, until the first capped corpus is used up; None when none is."""
        return self._run.course.supply()

    @property
    def samples_per_epoch(self) -> dict[str, int]:
        """Rows in one pass over each corpus at the present sequence length, by name."""
        return self._run.course.samples_per_epoch(self.step)

    @property
    def first_rows(self) -> dict[str, int]:
        """As samples_per_epoch, but of a streamed corpus the rows of its first part, which all ranks know."""
        return self._run.course.first_rows(self.step)

    @property
    def sequence_length(self) -> int:
        """Tokens per row of the next step."""
        return self._run.timeline.length_at(self.step)

    def sequence_length_at(self, step: int) -> int:
        """Return the tokens per row of a step, past or to come."""
        return self._run.timeline.length_at(at_least(0, "step", step))

    @property
    def global_batch_size(self) -> int:
        """Rows of the next step over all ranks."""
        return self._run.timeline.batch_size_at(self.step)

    @property
    def weights(self) -> dict[str, float]:
        """Share of each corpus in the next step's mixture, by name; they sum to one."""
        slots = self._run.timeline.slots_at(self.step)
        return {name: slots.get(name, 0) / sum(slots.values()) for name in self._run.sources}

    @property
    def mixtures(self) -> list[tuple[int, dict[str, float], str]]:
        """Every mixture of the run, planned ones too: first step, shares, what asked for it."""
        return [
            (step, {name: count / sum(slots.values()) for name, count in slots.items()}, reason)
            for step, slots, reason in self._run.timeline.mixtures
        ]

    def samples_of(self, step: int) -> Int64:
        """Return the ids of the global samples of a step [global batch size], past or to come."""
        return self._run.timeline.samples_of(at_least(0, "step", step))

    def tokens_before(self, step: int) -> int:
        """Return how many tokens, padding counted, all ranks are served before a step."""
        return self._run.timeline.tokens_before(at_least(0, "step", step))

    def samples_by_corpus(self, step: int) -> dict[str, int]:
        """Return how many samples the steps before a step take from each corpus, by name."""
        return samples_by_corpus(self._run.course, at_least(0, "step", step))

    def tokens_by_corpus(self, step: int) -> dict[str, int]:
        """Return how many tokens, padding counted, the steps before a step take from each corpus."""
        return tokens_by_corpus(self._run.course, at_least(0, "step", step))

    def padding_by_corpus(self, step: int) -> dict[str, int]:
        """Return how many positions of the steps before a step hold no token, by corpus."""
        wasted = waste_by_corpus(self._run.course, at_least(0, "step", step))
        return {name: waste.padding for name, waste in wasted.items()}

    def left_out_by_corpus(self, step: int) -> dict[str, Waste]:
        """Return what packing "whole" truncated or dropped in the steps before a step, by corpus.

        Counted when the last row is served of the pool that a document lies in.
        """
        wasted = waste_by_corpus(self._run.course, at_least(0, "step", step))
        return {name: replace(waste, padding=0) for name, waste in wasted.items()}

    def length_changes(self) -> list[LengthChange]:
        """Return the changes of the sequence length so far, with what each cut anew."""
        return length_changes(self._run.course, self.step)

    def epochs_by_corpus(self, step: int) -> dict[str, float]:
        """Return how many passes over each corpus the steps before a step make."""
        return self._run.epochs_by_corpus(self.tokens_by_corpus(step))

    def batch_at(self, step: int) -> dict[str, Any]:  # Any: tensors or arrays, as `deliver` says
        """Return this rank's batch of any step, without moving the loader.

        Raises:
            CorpusExhausted: the step needs more epochs of a corpus than it may give.
            ConfigError: a past step's batch does not divide over this loader's ranks.
        """
        return self._deliver(Batch(self.fields_at(step)))

    def fields_at(
        self, step: int, on_sample: Callable[[int], None] = lambda _sample: None
    ) -> dict[str, Int64 | Int32]:
        """Return this rank's batch of any step as arrays.

        Args:
            on_sample: called with each sample id before it is transformed.
        """
        return self._reader.step(self._run.course, at_least(0, "step", step), on_sample)

    def gather(self, samples: Int64) -> dict[str, Any]:
        """Return a batch of any global samples [n], in the order given, whole on this rank.

        Raises:
            CorpusExhausted: one of them needs more epochs of a corpus than it may give.
            UsageError: there are none, one is negative, or they are of different sequence lengths.
        """
        samples = sample_ids(samples)
        if not len(samples):
            raise UsageError("gather takes one sample or more", got=[])
        return self._deliver(Batch(self._reader.samples(self._run.course, samples)))

    def explain(self, samples: Int64) -> list[list[Piece]]:
        """Return where the tokens of each sample come from, piece by piece."""
        return explain(self._run.course, sample_ids(samples))

    def find(self, name: str, document: int, *, steps: range) -> list[Use]:
        """Return which rows of some steps train on a document of a corpus, in the order of steps.

        Raises:
            ConfigError: no such corpus.
            UsageError: it has no such document.
        """
        return find(self._run.course, name, document, steps=steps)

    def corpora_of(self, samples: Int64) -> Int64:
        """Return which corpus each sample [n] comes from [n]: its index in `corpora`, or -1 if not there."""
        here, course = list(self._run.sources), self._run.course
        numbers = np.array(
            [here.index(name) if name in here else -1 for name in course.names], dtype=np.int64
        )
        return numbers[course.locate(sample_ids(samples)).corpus]

    def set_weights(
        self, weights: Mapping[str, float], *, reason: str = "set_weights", step: int | None = None
    ) -> None:
        """Change the mixture from the next step on; call it on all ranks at the same step.

        Args:
            weights: for every corpus; 0 leaves one out.
            reason: kept in the state.
            step: from a later step on; a state that is saved before it does not know of the change yet.
        """
        self._run.set_weights(weights, reason=reason, step=self._not_past(step))
        self._changes += 1

    def add_corpus(self, name: str, path: str | Path, *, weights: Mapping[str, float]) -> None:
        """Add a corpus from the next step on; call it on all ranks at the same step.

        Args:
            weights: of all corpora, this one included.
        """
        self._run.add_corpus(name, path, weights)
        self._changes += 1

    def remove_corpus(self, name: str, *, weights: Mapping[str, float] | None = None) -> None:
        """Leave a corpus out from the next step on; call it on all ranks at the same step.

        Args:
            weights: of the others; None: they keep their proportions.
        """
        self._run.remove_corpus(name, weights)
        self._changes += 1

    def extend_corpus(self, name: str, *, parts: int | None = None, step: int | None = None) -> None:
        """Take up what was appended to a corpus, from the next step on; call it on all ranks at one step.

        What is new is read by itself once the corpus's epoch under way has ended, and as part of the
        whole from then on.

        Args:
            parts: how many parts of the corpus to know from now on; None: all.
            step: from a later step on.
        """
        self._run.extend_corpus(name, parts, step=self._not_past(step))
        self._changes += 1

    def set_global_batch_size(self, size: int) -> None:
        """Change the rows per step from the next step on; call it on all ranks at the same step."""
        size = at_least(1, "global_batch_size", size)
        check_divisible(size, world_size=self._reader.world_size)
        self._run.set_global_batch_size(size)
        self._changes += 1

    def set_sequence_length(self, length: int) -> None:
        """Change the tokens per row from the next step on; call it on all ranks at the same step.

        What is left of each corpus's epoch is cut anew (see legs.py): no token is lost or repeated.
        """
        self._run.set_sequence_length(at_least(2, "sequence_length", length, most=MOST_LENGTH))
        self._changes += 1

    def skip(
        self, *, samples: range | None = None, steps: range | None = None, reason: str = "skipped"
    ) -> None:
        """Never serve some samples to come; call it on all ranks at the same step.

        Later samples move up: the batch of a skipped step holds what would have followed. To skip again what
        is skipped already changes nothing.

        Args:
            samples: ids of samples.
            steps: steps whose samples are meant.
            reason: kept in the state.
        """
        self._run.skip(samples=samples, steps=steps, reason=reason)
        self._changes += 1

    def _not_past(self, step: int | None) -> int:
        if step is None:
            return self.step
        step = at_least(0, "step", step)
        if step < self.step:
            raise UsageError(f"{self.step} steps were served already", got=step, fix="Change a later one.")
        return step

    def __iter__(self) -> Generator[dict[str, Any]]:
        with self._feed() as feed:
            while True:
                changes, step = self._changes, self.step
                with closing(feed.batches(step)) as batches:
                    # Until something is changed or another iterator moves: what was prepared is out of date.
                    while (changes, step) == (self._changes, self.step):
                        batch = next(batches)
                        step += 1
                        self._run.step = step
                        yield batch

    def state_dict(self) -> State:
        """Return the state after the batches handed out so far: JSON values, equal on all ranks."""
        return self._run.state_at(self.step)

    def state_at(self, step: int) -> State:
        """Return the state that this loader has after the steps before a step, as far as it is planned."""
        return self._run.state_at(at_least(0, "step", step))

    def load_state_dict(self, state: State) -> None:
        """Continue from a saved state, on this loader's ranks.

        Weights, batch size and sequence length go on as they were, unless this loader was made with others
        than the loader that saved the state: then its own hold from here on. Takes effect at once, also
        in the middle of an iteration.

        Raises:
            StateMismatch: the state was saved with another seed, packing or split, or is damaged.
            CorpusChanged: a corpus is not the one the state was saved with.
        """
        self._run.load_state_dict(state)
        self._changes += 1

    def restore(self, snapshot: Snapshot) -> None:
        """Become what a loader of the same arguments was, with what it was told of steps to come."""
        self._run.restore(snapshot)
        self._changes += 1

    @property
    def dataset(self) -> Any:  # Any: a torch Dataset, whose module is loaded only here
        """The samples as a map-style torch dataset: `loader.dataset[k]` is global sample k."""
        from penstock.data.torch_dataset import map_style

        return map_style(self)

    def stream(self, steps: int | None = None) -> Any:  # Any: as above
        """Return the batches from here on as an iterable torch dataset, for DataLoader(..., batch_size=None).

        Args:
            steps: batches until the stream ends; None: it goes on for ever.
        """
        from penstock.data.torch_dataset import stream

        return stream(self, steps)

    def _feed(self) -> Feed:
        if not (self._processes and self._reader.transform):
            return ThreadFeed(self.batch_at, depth=self._prefetch, num_workers=self._num_workers)
        return ProcessFeed(
            _again({**self._options(), "deliver": "numpy", "num_workers": 0}, self._run.snapshot()),
            snapshot=self._run.snapshot,
            deliver=self._deliver,
            depth=self._prefetch,
            processes=self._processes,
            name=name_of(self._reader.transform),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._options(), self._run.snapshot())

    def _options(self) -> dict[str, Any]:
        return {
            **self._run.arguments,
            "transform": self._reader.transform,
            "transform_processes": self._processes,
            "rank": self._reader.rank,
            "world_size": self._reader.world_size,
            "fields": self._reader.fields,
            "num_workers": self._num_workers,
            "prefetch": self._prefetch,
            "deliver": self._delivers,
        }


def _again(options: dict[str, Any], snapshot: Snapshot) -> Loader:
    """Open a loader in another process, where the first one is."""
    loader = Loader(**options)
    loader.restore(snapshot)
    return loader
