"""Public loader: batches by step, questions about the order, and changes during a run.

A batch is a function of (corpora, seed, change log, step): `batch_at` may be called for any step on any rank
at any time. Iteration only counts steps, and the count is the state. Rank and world size decide only which
rows this process computes.

Questions may be about past and future steps, as far as changes are known. Make a change on all ranks at the
same step: each rank computes its batches from its own change log. A change becomes an entry of the change
log, and so part of the state; a refused change has no effect.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.core.arrays import Int64
from penstock.core.checks import at_least, check_divisible, check_text, number, whole_number
from penstock.core.dtypes import choice_of
from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.collate import FIELDS
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus_reader import CorpusReader, check_name
from penstock.data.explain import (
    DocumentSpan,
    LengthChange,
    Use,
    explain,
    find,
    length_changes,
    samples_by_corpus,
    tokens_by_corpus,
    waste_by_corpus,
)
from penstock.data.feed import ahead
from penstock.data.loader_state import (
    LoaderSnapshot,
    LoaderState,
    OnChange,
    ResumeChange,
    address_of,
    as_saved,
    with_appended,
)
from penstock.data.order.holdout import Split
from penstock.data.reader import Reader
from penstock.data.schedule.change_log import Change, Skip
from penstock.data.schedule.mixture import slots_from, slots_of
from penstock.data.state import State, check_contents
from penstock.data.types import MAX_LENGTH, MAX_ROWS, MAX_SAMPLES, Batch, Waste

if TYPE_CHECKING:
    from penstock.data.transform import Transform


class Loader:
    """Iterable of batches that resumes exactly on any number of ranks.

    Each batch is a dict of this rank's share of one step: `sample_ids` [local_batch] int64 always,
    and the requested fields: `input_ids`, `labels`, `position_ids`, `document_ids`
    [local_batch, sequence_length] of `dtype`, `cu_seqlens` [documents + 1] int32 (see collate.py), and
    columns of the corpora by name, aligned with the labels (see corpus/columns.py). Labels of tokens that a
    corpus's column `learned` leaves out are -100.

    Iteration is endless, epoch after epoch, from the present state on; a new `iter()` continues and does not
    start again. Closing or dropping an iterator ends its threads.


    Args:
        corpora: name -> corpus folder or address. The names key the order and the state; the paths do not.
        weights: share of samples by name, need not sum to one; None: in proportion to tokens.
        sequence_length: tokens per row.
        global_batch_size: rows per step over all ranks; a multiple of `world_size`.
        rank: data-parallel rank of this process.
        world_size: number of data-parallel ranks.
        micro_batch_size: rows of one forward pass, or a function step -> rows (pickled with the loader). Each
            micro-batch contains every corpus within one row of its share. None: the whole batch.
        seed: keys every permutation.
        packing: rule that places documents into rows: "best_fit", "concat" or "whole".
        overlong: with packing "whole": "truncate" or "drop" documents longer than a row; None: refuse them.
        fields: fields to build, and columns that every corpus has; each costs memory traffic.
        epochs: name -> largest number of epochs of that corpus; absent: no cap.
        split: "train", or "heldout" for the part that training never sees.
        holdout: share of each corpus that is held out for validation.
        dtype: "int64", or "int32": half the memory, and a third less time.
        num_workers: threads that prepare batches ahead; 0: none. None: one if there is a transform or a
            remote corpus (a batch of local files costs less than a thread). Affects only speed.
        prefetch: batches prepared ahead.
        deliver: "torch" for CPU tensors, "pinned" for page-locked ones, "numpy" for arrays.
        schedule: changes of weights, batch size or sequence length planned from the start.
        transform: function of (sample, generator keyed by its id); see transform.py. If it is slower than the
            training step, run it in processes: a DataLoader over `stream()`.
        columns: name -> folder or address of more columns for that corpus, as `ColumnWriter` makes it.

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
        micro_batch_size: int | Callable[[int], int | None] | None = None,
        seed: int = 0,
        packing: str = "best_fit",
        overlong: str | None = None,
        fields: Sequence[str] = ("input_ids", "labels"),
        epochs: Mapping[str, int] | None = None,
        split: Split = "train",
        holdout: float = 0.0,
        dtype: str = "int64",
        num_workers: int | None = None,
        prefetch: int = 2,
        deliver: str = "torch",
        schedule: Sequence[Change] = (),
        transform: "Transform | None" = None,
        columns: Mapping[str, str | Path] | None = None,
    ) -> None:
        self._run = LoaderState(
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
            columns=columns or {},
        )
        world_size, rank = self._run.arguments["world_size"], whole_number("rank", rank)
        if not 0 <= rank < world_size:
            raise ConfigError(f"rank must be in [0, {world_size})", got=rank)
        self._micro_batch_size = micro_batch_size
        self._reader = Reader(
            fields=check_fields(fields, [source.corpus for source in self._run.sources.values()]),
            dtype=check_dtype(dtype),
            rank=rank,
            world_size=world_size,
            micro_rows=micro_rows(
                micro_batch_size, local=self._run.arguments["global_batch_size"] // world_size
            ),
            transform=transform,
            seed=seed,
        )
        self._reader.check(self._run.sample_index)
        self._num_workers = (
            None if num_workers is None else at_least(0, "num_workers", num_workers, most=1024)
        )
        self._prefetch = at_least(0, "prefetch", prefetch, most=1024)
        self._deliver = delivery(deliver)
        self._delivers = deliver

    def batch_at(self, step: int) -> dict[str, Any]:  # Any: tensors or arrays, as `deliver` says
        """Return this rank's batch of any step, without advancing the loader.

        Raises:
            CorpusExhausted: the step is beyond the cap on epochs of a corpus.
            ConfigError: a past step's batch size is not divisible by `world_size`.
        """
        return self._deliver(Batch(self._reader.step(self._run.sample_index, at_least(0, "step", step))))

    def gather(self, samples: Int64) -> dict[str, Any]:
        """Return a batch of any global samples [n], in the order given, all on this rank.

        Raises:
            CorpusExhausted: a sample is beyond the cap on epochs of its corpus.
            UsageError: there is no sample, one is negative, or they have different sequence lengths.
        """
        samples = sample_ids(samples)
        if not len(samples):
            raise UsageError("gather needs at least one sample", got=[])
        return self._deliver(Batch(self._reader.samples(self._run.sample_index, samples)))

    def __iter__(self) -> Generator[dict[str, Any]]:
        workers = self._num_workers
        if workers is None:
            workers = int(self._reader.transform is not None or self._run.is_far)
        while True:
            sample_index, step = self._run.sample_index, self.step
            prepared = ahead(self.batch_at, start=step, depth=self._prefetch, num_workers=workers)
            with closing(prepared) as batches:
                # Until a setting changes or another iterator advances: prepared batches are then out of date.
                while self._run.sample_index is sample_index and self.step == step:
                    batch = next(batches)
                    step += 1
                    self._run.step = step
                    yield batch

    def state_dict(self) -> State:
        """Return the state after the batches returned so far: JSON values, equal on all ranks."""
        return self._run.state_at(self.step)

    def state_at(self, step: int) -> State:
        """Return the state after the steps before `step`, with the changes planned so far."""
        return self._run.state_at(at_least(0, "step", step))

    def load_state_dict(self, state: State, *, on_change: OnChange = "keep") -> None:
        """Continue from a saved state, on this loader's ranks.

        The run continues exactly as it was saved, with all changes made before: weights, batch size, sequence
        length, corpora added and removed. An added corpus is opened at its recorded address, unless this
        loader names it. Changes planned for later steps come from this loader's `schedule`. Takes effect at
        once, also during an iteration.

        Args:
            on_change: treatment of this loader's settings that differ from those of the loader that saved the
                state: "keep" continues with the saved ones, "apply" uses this loader's from here on. Each
                difference is logged and listed in `resume_changes`.

        Raises:
            StateMismatch: the state is damaged, or was saved with another seed, packing or split; or a corpus
                that it trains on is missing.
            CorpusChanged: the contents of a corpus differ from those the state was saved with.
        """
        self._run.load_state_dict(state, on_change=on_change)

    def snapshot(self) -> LoaderSnapshot:
        """Return a copy of this loader's run for `restore`, planned changes included."""
        return self._run.snapshot()

    def restore(self, snapshot: LoaderSnapshot) -> None:
        """Restore a snapshot of a loader with the same arguments, planned changes included."""
        self._run.restore(snapshot)

    @property
    def dataset(self) -> Any:  # Any: a torch Dataset, whose module is loaded only here
        """The samples as a map-style torch dataset: `loader.dataset[k]` is global sample k."""
        from penstock.data.torch_dataset import map_style

        return map_style(self)

    def stream(self, steps: int | None = None) -> Any:  # Any: as above
        """Return the batches from here on as an iterable torch dataset, for DataLoader(..., batch_size=None).

        Args:
            steps: number of batches; None: endless.
        """
        from penstock.data.torch_dataset import stream

        return stream(self, steps)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self._options(), self.snapshot())

    def _options(self) -> dict[str, Any]:
        return {
            **self._run.arguments,
            "transform": self._reader.transform,
            "rank": self._reader.rank,
            "micro_batch_size": self._micro_batch_size,
            "fields": self._reader.fields,
            "dtype": self._reader.dtype.name,
            "num_workers": self._num_workers,
            "prefetch": self._prefetch,
            "deliver": self._delivers,
        }

    def set_weights(
        self, weights: Mapping[str, float], *, reason: str = "set_weights", step: int | None = None
    ) -> None:
        """Change the mixture from the next step on; call it on all ranks at the same step.

        Args:
            weights: weight of every corpus; 0: the corpus is not read.
            reason: stored in the state.
            step: later step at which the change takes effect; a state saved before it does not contain the
                change.
        """
        run, step = self._run, self._not_past(step)
        slots = slots_from(weights, run.members)
        run.follow(run.change_log.with_slots(step, slots, check_text("reason", reason)))

    def add_corpus(self, name: str, path: str | Path, *, weights: Mapping[str, float]) -> None:
        """Add a corpus from the next step on; call it on all ranks at the same step.

        Give the same path on all ranks: the state records it, and a resumed loader that does not name the
        corpus opens it there. A corpus that was removed continues where it stopped.

        Args:
            weights: weight of every corpus, this one included.

        Raises:
            CorpusError: it is missing or damaged.
            CorpusChanged: a corpus of this name was removed before and had other contents.
            ConfigError: the loader already has a corpus of this name; or its token ids do not fit `dtype`.
        """
        run = self._run
        check_name(name)
        if name in run.members:
            raise ConfigError("The loader already has a corpus of this name", got=name)
        source = run.opened(name, path)
        self._reader.check_corpus(name, source.corpus)
        plan = run.plan_for(source)
        was = run.described(name)
        if was:
            check_contents(name, source, was, run.change_log)
            plan = as_saved(plan, was)
        slots = slots_from(weights, [*run.members, name])
        change_log = run.change_log.with_slots(run.step, slots, f"add {name}").with_member(run.step, name)
        if not was:
            change_log = with_appended(change_log, {name: source}, step=run.step)
        run.follow(change_log, sources={**run.sources, name: source}, plans={**run.plans, name: plan})
        run.addresses = {**run.addresses, name: address_of(path)}

    def remove_corpus(self, name: str, *, weights: Mapping[str, float] | None = None) -> None:
        """Remove a corpus from the next step on; call it on all ranks at the same step.

        Planned mixtures lose it too. A resumed loader does not need it, but then cannot read earlier steps.
        `add_corpus` brings it back.

        Args:
            weights: weights of the others; None: they keep their proportions.

        Raises:
            ConfigError: no such corpus; or the mixture, or a planned one, would be empty.
        """
        run = self._run
        self._source(name)
        others = [other for other in run.members if other != name]
        if weights is None:
            now = run.change_log.slots_at(run.step)
            slots = slots_of({other: now[other] for other in others})
        else:
            slots = slots_from(weights, others)
        change_log = run.change_log.with_slots(run.step, slots, f"remove {name}").without_member(
            run.step, name
        )
        for step, left, _ in change_log.mix:
            if not any(left.values()):
                raise ConfigError(
                    f"Without corpus {name!r} the mixture planned for step {step} is empty",
                    fix="First give other weights for that step with set_weights(..., step=...).",
                )
        if any(slots.get(name) for _, slots, _ in change_log.mix):
            run.follow(change_log)
        else:  # no sample of it was served
            run.follow(
                change_log,
                sources={other: source for other, source in run.sources.items() if other != name},
                plans={other: plan for other, plan in run.plans.items() if other != name},
            )

    def extend_corpus(self, name: str, *, parts: int | None = None, step: int | None = None) -> None:
        """Use parts that were appended to a corpus from the next step on; call it on all ranks at one step.

        The new parts are read by themselves after the corpus's epoch in progress, and as part of the whole
        from then on.

        Args:
            parts: number of parts to use from now on; None: all.
            step: later step at which the change takes effect.
        """
        run, step = self._run, self._not_past(step)
        source = self._source(name)
        source.reopen()
        known, finished = len(source.corpus.manifest.part_ends), source.corpus.manifest.streamed_parts
        parts = known if parts is None else at_least(1, "parts", parts)
        if finished == 0:
            raise ConfigError(f"Corpus {name!r} is extended automatically during its preparation", got=name)
        if parts > known:
            raise ConfigError(f"Corpus {name!r} has only {known} parts", got=parts)
        base = finished or run.plans[name].base_parts
        before = max([base, *(n for _, of, n in run.change_log.grown if of == name)])
        if parts > before:
            run.follow(run.change_log.with_parts(step, name, parts))

    def set_global_batch_size(self, size: int, *, step: int | None = None) -> None:
        """Change the rows per step from the next step on; call it on all ranks at the same step.

        Args:
            step: later step at which the change takes effect.
        """
        step = self._not_past(step)
        size = at_least(1, "global_batch_size", size, most=MAX_ROWS)
        check_divisible(size, world_size=self._run.arguments["world_size"])
        self._run.follow(self._run.change_log.with_batch_size(step, size))

    def set_sequence_length(self, length: int) -> None:
        """Change the tokens per row from the next step on; call it on all ranks at the same step.

        The rest of each corpus's epoch is packed again (see epochs.py): no token is lost or repeated.
        """
        length = at_least(2, "sequence_length", length, most=MAX_LENGTH)
        self._run.follow(self._run.change_log.with_length(self._run.step, length))

    def skip(
        self, *, samples: range | None = None, steps: range | None = None, reason: str = "skipped"
    ) -> None:
        """Exclude future samples from the run; call it on all ranks at the same step.

        Later samples move up: the batch of a skipped step holds what would have followed. Skipping a sample
        twice has no further effect.

        Args:
            samples: ids of the samples to skip.
            steps: steps whose samples to skip.
            reason: stored in the state.
        """
        change_log = self._run.change_log
        if (samples is None) == (steps is None):
            raise UsageError("skip takes either samples or steps", got=(samples, steps))
        if steps is not None:
            if not isinstance(steps, range) or not steps or steps.step != 1:
                raise UsageError("steps must be a contiguous range of at least one step", got=steps)
            ids = change_log.samples_of(steps[0])[0], change_log.samples_of(steps[-1])[-1]
            samples = range(int(ids[0]), int(ids[1]) + 1)
        assert samples is not None
        if not isinstance(samples, range) or not samples or samples.step != 1 or samples.start < 0:
            raise UsageError("samples must be a contiguous range of at least one sample", got=samples)
        if samples.stop >= MAX_SAMPLES:
            raise UsageError("samples must be below 2^62", got=samples)
        first = change_log.first_sample(self._run.step)
        if not change_log.skips_all(samples.start, min(first, samples.stop)):
            raise UsageError(
                f"Samples before {first} have already been served",
                got=samples,
                fix="Load a state saved before them.",
            )
        self._run.follow(
            change_log.with_skip(Skip(samples.start, samples.stop, check_text("reason", reason)))
        )

    def _not_past(self, step: int | None) -> int:
        if step is None:
            return self._run.step
        step = at_least(0, "step", step)
        if step < self._run.step:
            raise UsageError(
                f"{self._run.step} steps have already been served", got=step, fix="Change a later step."
            )
        return step

    def _source(self, name: str) -> CorpusReader:
        run = self._run
        if name not in run.members:
            raise ConfigError("The loader has no such corpus", got=name, fix=nearest(name, run.members))
        return run.sources[name]

    @property
    def step(self) -> int:
        """Number of batches returned so far: the number of the next step."""
        return self._run.step

    @property
    def corpora(self) -> dict[str, Corpus]:
        """Corpora of the present mixture by name, without removed ones."""
        return {name: self._run.sources[name].corpus for name in self._run.members}

    @property
    def num_samples(self) -> int | None:
        """Samples, skipped ones included, until the first cap on epochs; None if no corpus has a cap."""
        return self._run.sample_index.supply()

    @property
    def samples_per_epoch(self) -> dict[str, int]:
        """Rows of one epoch of each corpus at the present sequence length, by name."""
        return self._run.sample_index.samples_per_epoch(self.step)

    @property
    def first_rows(self) -> dict[str, int]:
        """Like samples_per_epoch, but a streamed corpus counts with its first part: equal on all ranks."""
        return self._run.sample_index.first_rows(self.step)

    @property
    def sequence_length(self) -> int:
        """Tokens per row of the next step."""
        return self._run.change_log.length_at(self.step)

    def sequence_length_at(self, step: int) -> int:
        """Return the tokens per row of a past or future step."""
        return self._run.change_log.length_at(at_least(0, "step", step))

    @property
    def global_batch_size(self) -> int:
        """Rows of the next step over all ranks."""
        return self._run.change_log.batch_size_at(self.step)

    @property
    def world_size(self) -> int:
        """Number of data-parallel ranks."""
        size: int = self._run.arguments["world_size"]
        return size

    @property
    def resume_changes(self) -> tuple[ResumeChange, ...]:
        """Settings in which this loader differs from the run it resumed last."""
        return self._run.resume_changes

    @property
    def weights(self) -> dict[str, float]:
        """Share of each corpus in the next step's mixture, by name; they sum to 1."""
        slots = self._run.change_log.slots_at(self.step)
        return {name: slots[name] / sum(slots.values()) for name in self._run.members}

    @property
    def mixtures(self) -> list[tuple[int, dict[str, float], str]]:
        """Mixtures of the run, planned ones included: (first step, shares by name, reason)."""
        return [
            (step, {name: count / sum(slots.values()) for name, count in slots.items()}, reason)
            for step, slots, reason in self._run.change_log.mixtures
        ]

    def samples_of(self, step: int) -> Int64:
        """Return the global sample ids of a past or future step: [global batch size]."""
        return self._run.change_log.samples_of(at_least(0, "step", step))

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens, padding included, that all ranks are served before a step."""
        return self._run.change_log.tokens_before(at_least(0, "step", step))

    def samples_by_corpus(self, step: int) -> dict[str, int]:
        """Return the number of samples taken from each corpus by the steps before `step`, by name."""
        return samples_by_corpus(self._run.sample_index, at_least(0, "step", step))

    def tokens_by_corpus(self, step: int) -> dict[str, int]:
        """Return the tokens, padding included, taken from each corpus by the steps before `step`."""
        return tokens_by_corpus(self._run.sample_index, at_least(0, "step", step))

    def padding_by_corpus(self, step: int) -> dict[str, int]:
        """Return the number of padding positions in the steps before `step`, by corpus."""
        wasted = waste_by_corpus(self._run.sample_index, at_least(0, "step", step))
        return {name: waste.padding for name, waste in wasted.items()}

    def left_out_by_corpus(self, step: int) -> dict[str, Waste]:
        """Return what packing "whole" truncated or dropped in the steps before `step`, by corpus.

        A document counts once the last row of its pool has been served.
        """
        wasted = waste_by_corpus(self._run.sample_index, at_least(0, "step", step))
        return {name: replace(waste, padding=0) for name, waste in wasted.items()}

    def length_changes(self) -> list[LengthChange]:
        """Return the sequence-length changes so far, with the rows that each packed again."""
        return length_changes(self._run.sample_index, self.step)

    def epochs_by_corpus(self, step: int) -> dict[str, float]:
        """Return the number of epochs of each corpus made by the steps before `step`."""
        return self._run.epochs_by_corpus(self.tokens_by_corpus(step))

    def steps_of_epochs(self, epochs: float) -> int:
        """Return the steps of `epochs` passes over the rows of all corpora together, rounded up.

        Changes of the batch size and of the sequence length count as far as they are known, and skipped rows
        count as read.

        Raises:
            ConfigError: the number is not above 0, or a corpus is still being prepared.
        """
        epochs = number("epochs", epochs)
        if not 0 < epochs < math.inf:
            raise ConfigError("epochs must be a number above 0", got=epochs)
        end = self._run.sample_index.end_of_epochs(epochs)
        if end > MAX_SAMPLES:
            raise ConfigError("These epochs exceed 2^62 samples", got=epochs)
        return bisect_left(range(end + 1), end, key=self._run.change_log.first_sample)

    def explain(self, samples: Int64) -> list[list[DocumentSpan]]:
        """Return the document spans of each sample: the sources of its tokens, in order."""
        return explain(self._run.sample_index, sample_ids(samples))

    def find(self, name: str, document: int, *, steps: range) -> list[Use]:
        """Return the rows of some steps that train on a document of a corpus, in step order.

        Raises:
            ConfigError: no such corpus.
            UsageError: the corpus has no such document.
        """
        return find(self._run.sample_index, name, document, steps=steps)

    def corpora_of(self, samples: Int64) -> Int64:
        """Return the corpus of each sample [n]: its index [n] in `corpora`; -1 for a removed corpus."""
        here, sample_index = self._run.members, self._run.sample_index
        numbers = np.array(
            [here.index(name) if name in here else -1 for name in sample_index.names], dtype=np.int64
        )
        return numbers[sample_index.locate(sample_ids(samples)).corpus]


def _reopened(options: dict[str, Any], snapshot: LoaderSnapshot) -> Loader:
    """Unpickle a loader: open it with its options and restore its snapshot."""
    loader = Loader(**options)
    loader.restore(snapshot)
    return loader


def micro_rows(
    micro_batch_size: int | Callable[[int], int | None] | None, *, local: int
) -> Callable[[int], int | None]:
    """Return a function from the step to the rows of a micro-batch (None: one micro-batch).

    Args:
        local: rows of a rank's first batch.

    Raises:
        ConfigError: the number does not divide a rank's rows.
    """
    if micro_batch_size is None or callable(micro_batch_size):
        return micro_batch_size or _one_micro_batch
    rows = at_least(1, "micro_batch_size", micro_batch_size)
    if local % rows:
        raise ConfigError(
            f"A micro_batch_size of {rows} does not divide a rank's {local} rows",
            fix="Use a divisor, or leave it out.",
        )
    return lambda _step: rows


def _one_micro_batch(_step: int) -> None:
    return None


def sample_ids(samples: Int64 | Sequence[int]) -> Int64:
    """Return sample ids [n] as int64.

    Raises:
        UsageError: they are not a list of integers in [0, 2^62].
    """
    try:
        ids = np.asarray(samples)
    except ValueError:  # lists of different lengths
        ids = np.empty((0, 0))
    whole = ids.ndim == 1 and (not len(ids) or ids.dtype.kind in "iu")
    if not whole or (len(ids) and not 0 <= ids.min() <= ids.max() <= MAX_SAMPLES):
        raise UsageError("Samples must be a list of integers in [0, 2^62]", got=samples)
    return ids.astype(np.int64, copy=False)


def check_fields(fields: Sequence[str], corpora: Iterable[Corpus]) -> tuple[str, ...]:
    """Return the names of the fields, columns of corpora included, after validation."""
    known = dict.fromkeys([*FIELDS, *(name for corpus in corpora for name in corpus.columns)])
    if isinstance(fields, str):
        raise ConfigError("fields must be a list of names", got=fields, fix=f"Write ({fields!r},).")
    if not isinstance(fields, Iterable):
        raise ConfigError("fields must be a list of names", got=fields)
    for field in fields:
        if field not in known:
            raise ConfigError("The loader has no such field", got=field, fix=nearest(field, list(known)))
    return tuple(fields)


def check_dtype(dtype: str) -> np.dtype[np.int64] | np.dtype[np.int32]:
    """Return the numpy type of a `dtype` argument."""
    dtype = choice_of(dtype, ("int64", "int32"))
    if dtype not in ("int64", "int32"):
        raise ConfigError("dtype has no such choice", got=dtype, fix="Known: int32, int64.")
    return np.dtype(np.int64) if dtype == "int64" else np.dtype(np.int32)


def delivery(deliver: str) -> Callable[[Batch], dict[str, Any]]:  # Any: tensors or arrays
    """Return the function that converts a Batch to what the loader yields: tensors or arrays."""
    if deliver == "numpy":
        return lambda batch: batch.fields
    if deliver not in ("torch", "pinned"):
        raise ConfigError("deliver has no such choice", got=deliver, fix="Known: numpy, pinned, torch.")
    from penstock.data.torch_dataset import to_tensors

    return partial(to_tensors, pin_memory=deliver == "pinned")
