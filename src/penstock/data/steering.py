"""What a loader can be told in the middle of a run: weights, corpora, sizes, samples to leave out.

Told to all ranks at the same step, for each goes by what it was told itself. It becomes an entry of the
timeline, and so of the state; what is refused changes nothing.
"""

from collections.abc import Mapping
from pathlib import Path

from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.arguments import at_least, check_name, check_text, slots_from
from penstock.data.assign import check_divisible
from penstock.data.identity import check_contents
from penstock.data.mixture import slots_of
from penstock.data.run import Run, with_appended
from penstock.data.source import Source
from penstock.data.timeline import MOST_LENGTH, MOST_SAMPLES, Skip
from penstock.data.wishes import as_saved


class Steering:
    """The part of `Loader` that takes changes."""

    _run: Run

    def set_weights(
        self, weights: Mapping[str, float], *, reason: str = "set_weights", step: int | None = None
    ) -> None:
        """Change the mixture from the next step on; call it on all ranks at the same step.

        Args:
            weights: for every corpus; 0 leaves one out.
            reason: kept in the state.
            step: from a later step on; a state that is saved before it does not know of the change yet.
        """
        run, step = self._run, self._not_past(step)
        slots = slots_from(weights, list(run.sources))
        run.follow(run.timeline.with_slots(step, slots, check_text("reason", reason)))

    def add_corpus(self, name: str, path: str | Path, *, weights: Mapping[str, float]) -> None:
        """Add a corpus from the next step on; call it on all ranks at the same step.

        Args:
            weights: of all corpora, this one included.
        """
        run = self._run
        check_name(name)
        if name in run.sources:
            raise ConfigError("The loader has a corpus of this name already", got=name)
        source = run.opened(name, path)
        sources = {**run.sources, name: source}
        plan = run.plan_for(source)
        if was := run.absent.get(name):  # it was taken out, and comes back where it stood
            check_contents(name, source, was, run.timeline)
            plan = as_saved(plan, was)
        timeline = run.timeline.with_slots(run.step, slots_from(weights, list(sources)), f"add {name}")
        if not was:
            timeline = with_appended(timeline, {name: source}, step=run.step)
        run.follow(timeline, sources=sources, plans={**run.plans, name: plan})

    def remove_corpus(self, name: str, *, weights: Mapping[str, float] | None = None) -> None:
        """Leave a corpus out from the next step on; call it on all ranks at the same step.

        Args:
            weights: of the others; None: they keep their proportions.
        """
        run = self._run
        self._source(name)
        others = [other for other in run.sources if other != name]
        if weights is None:
            now = run.timeline.slots_at(run.step)
            slots = slots_of({**{other: now.get(other, 0) for other in others}, name: 0})
        else:
            slots = {**slots_from(weights, others), name: 0}
        run.follow(run.timeline.with_slots(run.step, slots, f"remove {name}"))

    def extend_corpus(self, name: str, *, parts: int | None = None, step: int | None = None) -> None:
        """Take up what was appended to a corpus, from the next step on; call it on all ranks at one step.

        What is new is read by itself once the corpus's epoch under way has ended, and as part of the
        whole from then on.

        Args:
            parts: how many parts of the corpus to know from now on; None: all.
            step: from a later step on.
        """
        run, step = self._run, self._not_past(step)
        source = self._source(name)
        source.reopen()
        known, finished = len(source.corpus.manifest.part_ends), source.corpus.manifest.streamed_parts
        parts = known if parts is None else at_least(1, "parts", parts)
        if finished == 0:
            raise ConfigError(f"Corpus {name!r} is taken up by itself while it is prepared", got=name)
        if parts > known:
            raise ConfigError(f"Corpus {name!r} has {known} parts", got=parts)
        base = finished or run.plans[name].base_parts
        before = max([base, *(n for _, of, n in run.timeline.grown if of == name)])
        if parts > before:
            run.follow(run.timeline.with_parts(step, name, parts))

    def set_global_batch_size(self, size: int) -> None:
        """Change the rows per step from the next step on; call it on all ranks at the same step."""
        size = at_least(1, "global_batch_size", size)
        check_divisible(size, world_size=self._run.arguments["world_size"])
        self._run.follow(self._run.timeline.with_batch_size(self._run.step, size))

    def set_sequence_length(self, length: int) -> None:
        """Change the tokens per row from the next step on; call it on all ranks at the same step.

        What is left of each corpus's epoch is cut anew (see legs.py): no token is lost or repeated.
        """
        length = at_least(2, "sequence_length", length, most=MOST_LENGTH)
        self._run.follow(self._run.timeline.with_length(self._run.step, length))

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
        timeline = self._run.timeline
        if (samples is None) == (steps is None):
            raise UsageError("skip takes either samples or steps", got=(samples, steps))
        if steps is not None:
            if not isinstance(steps, range) or not steps or steps.step != 1:
                raise UsageError("steps must be a range of one step or more", got=steps)
            ids = timeline.samples_of(steps[0])[0], timeline.samples_of(steps[-1])[-1]
            samples = range(int(ids[0]), int(ids[1]) + 1)
        assert samples is not None
        if not isinstance(samples, range) or not samples or samples.step != 1 or samples.start < 0:
            raise UsageError("samples must be a range of one sample or more", got=samples)
        if samples.stop >= MOST_SAMPLES:
            raise UsageError("samples must be below 2^62", got=samples)
        first = timeline.first_sample(self._run.step)
        if not timeline.skips_all(samples.start, min(first, samples.stop)):
            raise UsageError(
                f"Samples before {first} were served already",
                got=samples,
                fix="Load a state from before them.",
            )
        self._run.follow(timeline.with_skip(Skip(samples.start, samples.stop, check_text("reason", reason))))

    def _not_past(self, step: int | None) -> int:
        if step is None:
            return self._run.step
        step = at_least(0, "step", step)
        if step < self._run.step:
            raise UsageError(
                f"{self._run.step} steps were served already", got=step, fix="Change a later one."
            )
        return step

    def _source(self, name: str) -> Source:
        sources = self._run.sources
        if name not in sources:
            raise ConfigError("The loader has no such corpus", got=name, fix=nearest(name, list(sources)))
        return sources[name]
