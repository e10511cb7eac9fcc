"""What a loader is in the middle of: its corpora, what it was told and when, and how far it is.

The course is made anew whenever the timeline changes. Nothing here reads tokens.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.arguments import at_least, open_sources, slots_from
from penstock.data.course import Course
from penstock.data.holdout import Split
from penstock.data.identity import check_corpora, check_identity, describe
from penstock.data.mixture import slots_of
from penstock.data.source import Source
from penstock.data.state import Saved, State, decode, encode
from penstock.data.timeline import Skip, Timeline
from penstock.data.way import Plan, begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that is planned from the start; what is None stays as it is."""

    step: int
    """First step it holds for."""
    weights: Mapping[str, float] | None = None
    """Of every corpus."""
    global_batch_size: int | None = None
    """Rows per step over all ranks."""
    sequence_length: int | None = None
    """Tokens per row."""


class Run:
    """The state of a loader, and the functions that follow from it.

    Args:
        as of Loader.
    """

    def __init__(
        self,
        corpora: Mapping[str, str | Path],
        *,
        weights: Mapping[str, float] | None,
        sequence_length: int,
        global_batch_size: int,
        seed: int,
        packing: str,
        epochs: Mapping[str, int],
        split: Split,
        holdout: float,
        schedule: Sequence[Change],
    ) -> None:
        length = at_least(2, "sequence_length", sequence_length)
        size = at_least(1, "global_batch_size", global_batch_size)
        self.arguments: dict[str, Any] = {  # Any: what Loader takes, to make another one
            "corpora": dict(corpora) if isinstance(corpora, Mapping) else corpora,
            "weights": None if weights is None else dict(weights),
            "sequence_length": length,
            "global_batch_size": size,
            "seed": at_least(0, "seed", seed),
            "packing": packing,
            "epochs": dict(epochs),
            "split": split,
            "holdout": holdout,
            "schedule": tuple(schedule),
        }
        self.step = 0
        self.sources = open_sources(corpora, rule=packing, epochs=epochs)
        self._longest = max([length, *(change.sequence_length or 0 for change in schedule)])
        self._plans = {name: self._plan(source) for name, source in self.sources.items()}
        slots = self._slots_asked()
        self._asked = {
            "weights": None if weights is None else slots,
            "global_batch_size": size,
            "sequence_length": length,
        }
        self._follow(self._scheduled(Timeline(((0, size),), ((0, length),), ((0, slots, "recipe"),)), 0))

    @property
    def timeline(self) -> Timeline:
        """What the run was told."""
        return self.course.timeline

    def samples_per_epoch(self) -> dict[str, int]:
        """Return the rows of one pass over each whole corpus at the present sequence length."""
        return self.course.samples_per_epoch()

    def samples_by_corpus(self, step: int) -> dict[str, int]:
        """Return how many samples the steps before a step take from each corpus."""
        first = self.timeline.first_sample(step)
        counts = Counter(self.course.counts(first))
        for skip in self.timeline.skips:
            if skip.start < first:
                counts.subtract(self.course.counts(min(first, skip.stop)))
                counts.update(self.course.counts(skip.start))
        return {name: counts[name] for name in self.sources}

    def tokens_by_corpus(self, step: int) -> dict[str, int]:
        """Return how many tokens, padding counted, the steps before a step take from each corpus."""
        tokens: Counter[str] = Counter()
        edges = [start for start, _ in self.timeline.length if start < step] + [step]
        for (start, length), stop in zip(self.timeline.length, edges[1:], strict=False):
            early, late = self.samples_by_corpus(start), self.samples_by_corpus(stop)
            tokens.update({name: (late[name] - early[name]) * length for name in late})
        return {name: tokens[name] for name in self.sources}

    def epochs_by_corpus(self, step: int) -> dict[str, float]:
        """Return how many passes over each corpus, as it is now, the steps before a step make."""
        return {name: tokens / self._tokens(name) for name, tokens in self.tokens_by_corpus(step).items()}

    def set_weights(self, weights: Mapping[str, float], *, reason: str, step: int) -> None:
        """Change the mixture from a step on."""
        self._follow(self.timeline.with_slots(step, slots_from(weights, list(self.sources)), reason))

    def add_corpus(self, name: str, path: str | Path, weights: Mapping[str, float]) -> None:
        """Add a corpus from the next step on."""
        if name in self.sources:
            raise ConfigError("The loader has a corpus of this name already", got=name)
        sources = open_sources({name: path}, rule=self.arguments["packing"], epochs={})
        slots = slots_from(weights, [*self.sources, name])
        self.sources |= sources
        self._plans[name] = self._plan(sources[name])
        self.arguments["corpora"][name] = path
        self._follow(self.timeline.with_slots(self.step, slots, f"add {name}"))

    def remove_corpus(self, name: str, weights: Mapping[str, float] | None) -> None:
        """Leave a corpus out from the next step on."""
        self._check_name(name)
        if weights is None:
            weights = {
                other: count for other, count in self.timeline.slots_at(self.step).items() if other != name
            }
        others = {other: weights.get(other, 0) for other in self.sources if other != name}
        self._follow(self.timeline.with_slots(self.step, slots_of({**others, name: 0}), f"remove {name}"))

    def extend_corpus(self, name: str, parts: int | None, *, step: int) -> None:
        """Take up the parts of a corpus that were appended, from a step on."""
        self._check_name(name)
        source = self.sources[name]
        source.reopen()
        known = len(source.corpus.manifest.part_ends)
        parts = known if parts is None else parts
        if self._plans[name].streamed:
            raise ConfigError(f"Corpus {name!r} is taken up by itself while it is prepared", got=name)
        if parts > known:
            raise ConfigError(f"Corpus {name!r} has {known} parts", got=parts)
        before = max([self._plans[name].base_parts, *(n for _, of, n in self.timeline.grown if of == name)])
        if parts > before:
            self._follow(self.timeline.with_parts(step, name, parts))

    def set_global_batch_size(self, size: int) -> None:
        """Change the rows per step from the next step on."""
        self._follow(self.timeline.with_batch_size(self.step, size))

    def set_sequence_length(self, length: int) -> None:
        """Change the tokens per row from the next step on."""
        self._follow(self.timeline.with_length(self.step, length))

    def skip(self, *, samples: range | None, steps: range | None, reason: str) -> None:
        """Leave out samples to come."""
        if (samples is None) == (steps is None):
            raise UsageError("skip takes either samples or steps", got=(samples, steps))
        if steps is not None:
            if not steps or steps.step != 1:
                raise UsageError("steps must be a range of one step or more", got=steps)
            ids = self.timeline.samples_of(steps[0])[0], self.timeline.samples_of(steps[-1])[-1]
            samples = range(int(ids[0]), int(ids[1]) + 1)
        assert samples is not None
        if not samples or samples.step != 1:
            raise UsageError("samples must be a range of one sample or more", got=samples)
        first = self.timeline.first_sample(self.step)
        if samples.start < first:
            raise UsageError(
                f"Samples before {first} were served already",
                got=samples,
                fix="Load a state from before them.",
            )
        self._follow(self.timeline.with_skip(Skip(samples.start, samples.stop, reason)))

    def state_dict(self) -> State:
        """Return the state after the steps taken."""
        corpora = {
            name: describe(self.sources[name], plan, self.course, step=self.step)
            for name, plan in self._plans.items()
        }
        return encode(Saved(self.step, self.timeline, self._asked, self._identity(), corpora))

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Loader.load_state_dict`."""
        saved = decode(state)
        check_identity(saved, self._identity())
        check_corpora(saved, self.sources)
        self._longest, self.step = saved.identity["longest"], saved.step
        for name in saved.corpora.keys() & self.sources.keys():
            was = saved.corpora[name]
            streamed, parts = bool(was.get("streamed")), was["parts"]
            self._plans[name] = replace(
                self._plans[name],
                streamed=streamed,
                base_parts=0 if streamed else parts,
                longest=self._longest,
            )
        timeline, asked = saved.timeline, self._asked
        if saved.asked.get("weights") != asked["weights"] or self.sources.keys() - saved.corpora.keys():
            timeline = timeline.with_slots(self.step, self._slots_asked(), "recipe")
        if saved.asked.get("global_batch_size") != asked["global_batch_size"]:
            timeline = timeline.with_batch_size(self.step, self.arguments["global_batch_size"])
        if saved.asked.get("sequence_length") != asked["sequence_length"]:
            timeline = timeline.with_length(self.step, self.arguments["sequence_length"])
        self._follow(self._scheduled(timeline, self.step))

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for the order to be; `longest` comes with a state."""
        arguments = self.arguments
        return {
            "seed": arguments["seed"],
            "packing": arguments["packing"],
            "split": [arguments["split"], arguments["holdout"]],
            "longest": self._longest,
        }

    def _follow(self, timeline: Timeline) -> None:
        self.course = Course(timeline, self.sources, self._plans)

    def _scheduled(self, timeline: Timeline, step: int) -> Timeline:
        """Return a timeline with what is planned for a step and later."""
        for change in sorted(self.arguments["schedule"], key=lambda change: change.step):
            if change.step < step:
                continue
            if change.weights is not None:
                slots = slots_from(change.weights, list(self.sources))
                timeline = timeline.with_slots(change.step, slots, "schedule")
            if change.global_batch_size is not None:
                timeline = timeline.with_batch_size(change.step, change.global_batch_size)
            if change.sequence_length is not None:
                timeline = timeline.with_length(change.step, change.sequence_length)
        return timeline

    def _slots_asked(self) -> dict[str, int]:
        weights = self.arguments["weights"]
        if weights is not None:
            return slots_from(weights, list(self.sources))
        if len(self.sources) > 1 and (growing := [n for n, plan in self._plans.items() if plan.streamed]):
            raise ConfigError(
                f"Corpus {growing[0]!r} is still being prepared, so its share is not known",
                fix="Give weights.",
            )
        return slots_of({name: self._tokens(name) if len(self.sources) > 1 else 1 for name in self.sources})

    def _tokens(self, name: str) -> int:
        """Return the tokens of a corpus's split, for its share of the mixture."""
        plan, corpus = self._plans[name], self.sources[name].corpus
        return plan.whole(corpus, len(corpus.manifest.part_ends), first=0).space.num_tokens

    def _plan(self, source: Source) -> Plan:
        manifest = source.corpus.manifest
        streamed = manifest.streamed_parts is not None
        arguments = self.arguments
        plan = Plan(
            name=source.name,
            seed=arguments["seed"],
            sequence_length=arguments["sequence_length"],
            longest=self._longest,
            split=arguments["split"],
            holdout=arguments["holdout"],
            streamed=streamed,
            base_parts=0 if streamed else len(manifest.part_ends),
        )
        begin(plan, source.corpus)  # a split that leaves a part empty is refused here, not at the first batch
        return plan

    def _check_name(self, name: str) -> None:
        if name not in self.sources:
            raise ConfigError(
                "The loader has no such corpus", got=name, fix=nearest(name, list(self.sources))
            )
