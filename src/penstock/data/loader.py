"""Steps to batches: the public loader.

Everything a step holds is a function of (corpora, seed, what the run was told, step): `batch_at` may be
called for any step on any rank at any time. Iteration only counts steps, and the count is the state. What
a loader can be asked is in answering.py, what it can be told in steering.py, and what it is in the middle of
in run.py. It knows ranks only as arguments of who computes what.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, UsageError
from penstock.data.answering import Answering
from penstock.data.arguments import at_least, check_fields, delivery, sample_ids, whole_number
from penstock.data.feed import Feed, ProcessFeed, ThreadFeed
from penstock.data.holdout import Split
from penstock.data.reader import Reader
from penstock.data.run import Run, Snapshot
from penstock.data.schedule import Change
from penstock.data.state import State
from penstock.data.steering import Steering
from penstock.data.transform import Transform, name_of
from penstock.data.types import Batch, Int32, Int64


class Loader(Answering, Steering):
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
            world_size=world_size,
        )
        world_size, rank = self._run.arguments["world_size"], whole_number("rank", rank)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size})", got=rank)
        self._reader = Reader(
            fields=check_fields(fields), rank=rank, world_size=world_size, transform=transform, seed=seed
        )
        self._num_workers = at_least(0, "num_workers", num_workers, most=1024)
        self._prefetch = at_least(0, "prefetch", prefetch, most=1024)
        self._processes = at_least(0, "transform_processes", transform_processes, most=1024)
        self._deliver = delivery(deliver)
        self._delivers = deliver

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

    def __iter__(self) -> Generator[dict[str, Any]]:
        with self._feed() as feed:
            while True:
                course, step = self._run.course, self.step
                with closing(feed.batches(step)) as batches:
                    # Until something is told or another iterator moves: what was prepared is out of date.
                    while self._run.course is course and self.step == step:
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

    def restore(self, snapshot: Snapshot) -> None:
        """Become what a loader of the same arguments was, with what it was told of steps to come."""
        self._run.restore(snapshot)

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
