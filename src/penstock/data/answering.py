"""What a loader can be asked: how far it is, what its steps hold and where from, at any step of the run.

Nothing here moves the loader or reads a token. What is asked of a step holds for past ones and for those to
come, as far as the run was told of them.
"""

from dataclasses import replace

import numpy as np

from penstock.data.arguments import at_least, sample_ids
from penstock.data.corpus import Corpus
from penstock.data.run import Run
from penstock.data.tally import (
    LengthChange,
    length_changes,
    samples_by_corpus,
    tokens_by_corpus,
    waste_by_corpus,
)
from penstock.data.trace import Piece, Use, explain, find
from penstock.data.types import Int64, Waste


class Answering:
    """The part of `Loader` that answers questions, from its run alone."""

    _run: Run

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
