"""What a loader is in the middle of: its corpora, what it was told and when, and how far it is.

The course is made anew whenever the timeline changes; a change that is refused leaves everything as it was.
Nothing here reads tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.data.arguments import (
    at_least,
    check_name,
    check_table,
    check_text,
    number,
    open_sources,
    slots_from,
)
from penstock.data.course import Course
from penstock.data.holdout import Split
from penstock.data.identity import check_contents, check_corpora, check_identity, check_sizes, describe
from penstock.data.mixture import slots_of
from penstock.data.schedule import Change, checked
from penstock.data.source import Source
from penstock.data.state import Saved, State, decode, encode
from penstock.data.timeline import MOST_LENGTH, MOST_SAMPLES, Skip, Timeline
from penstock.data.way import Plan
from penstock.data.wishes import Wishes, as_saved, plan_of, tokens_of

Described = dict[str, Any]  # Any: JSON values


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A run as it is, for a copy in another process. Unlike a state it knows what is planned."""

    step: int
    timeline: Timeline
    paths: dict[str, str | Path]
    plans: dict[str, Plan]
    absent: dict[str, Described]


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
        overlong: str | None,
        epochs: Mapping[str, int],
        split: Split,
        holdout: float,
        schedule: Sequence[Change],
    ) -> None:
        length = at_least(2, "sequence_length", sequence_length, most=MOST_LENGTH)
        size = at_least(1, "global_batch_size", global_batch_size)
        self.sources = open_sources(corpora, rule=packing, overlong=overlong, epochs=epochs)
        changes = checked(schedule, list(self.sources))
        self.arguments: dict[str, Any] = {  # Any: what Loader takes, to make another one
            "corpora": dict(corpora),
            "weights": None if weights is None else check_table("weights", weights, example="{'web': 1}"),
            "sequence_length": length,
            "global_batch_size": size,
            "seed": at_least(0, "seed", seed),
            "packing": packing,
            "overlong": overlong,
            "epochs": {name: at_least(1, name, cap) for name, cap in epochs.items()},
            "split": split,
            "holdout": number("holdout", holdout),
            "schedule": changes,
        }
        self.step = 0
        longest = max([length, *(change.sequence_length or 0 for change in changes)])
        self._plans = {name: self._plan(source, longest) for name, source in self.sources.items()}
        self._absent: dict[str, Described] = {}
        self._wishes = Wishes(
            weights=self.arguments["weights"],
            global_batch_size=size,
            sequence_length=length,
            schedule=changes,
        )
        timeline = self._wishes.from_the_start(self.sources, self._plans)
        self._follow(_with_appended(timeline, self.sources, step=0))

    @property
    def timeline(self) -> Timeline:
        """What the run was told."""
        return self.course.timeline

    def epochs_by_corpus(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """Return how many passes over each corpus, as it is now, so many tokens are, padding counted."""
        per_epoch = {name: tokens_of(self._plans[name], source) for name, source in self.sources.items()}
        if self.arguments["overlong"] is not None:  # rows are padded, and documents left out
            rows = self.course.samples_per_epoch(self.step)
            per_epoch = {name: rows[name] * self.timeline.length_at(self.step) for name in self.sources}
        return {name: tokens[name] / per_epoch[name] for name in self.sources}

    def set_weights(self, weights: Mapping[str, float], *, reason: str, step: int) -> None:
        """Change the mixture from a step on."""
        slots = slots_from(weights, list(self.sources))
        self._follow(self.timeline.with_slots(step, slots, check_text("reason", reason)))

    def add_corpus(self, name: str, path: str | Path, weights: Mapping[str, float]) -> None:
        """Add a corpus from the next step on."""
        check_name(name)
        if name in self.sources:
            raise ConfigError("The loader has a corpus of this name already", got=name)
        sources = {**self.sources, **self._opened(name, path)}
        plan = self._plan(sources[name], self._longest)
        if was := self._absent.get(name):  # it was taken out, and comes back where it stood
            check_contents(name, sources[name], was, self.timeline)
            plan = as_saved(plan, was)
        timeline = self.timeline.with_slots(self.step, slots_from(weights, list(sources)), f"add {name}")
        if not was:
            timeline = _with_appended(timeline, {name: sources[name]}, step=self.step)
        self._follow(timeline, sources=sources, plans={**self._plans, name: plan})
        self._absent.pop(name, None)

    def remove_corpus(self, name: str, weights: Mapping[str, float] | None) -> None:
        """Leave a corpus out from the next step on."""
        self._check_name(name)
        others = [other for other in self.sources if other != name]
        if weights is None:
            now = self.timeline.slots_at(self.step)
            slots = slots_of({**{other: now.get(other, 0) for other in others}, name: 0})
        else:
            slots = {**slots_from(weights, others), name: 0}
        self._follow(self.timeline.with_slots(self.step, slots, f"remove {name}"))

    def extend_corpus(self, name: str, parts: int | None, *, step: int) -> None:
        """Take up the parts of a corpus that were appended, from a step on."""
        self._check_name(name)
        source = self.sources[name]
        source.reopen()
        known = len(source.corpus.manifest.part_ends)
        parts = known if parts is None else at_least(1, "parts", parts)
        finished = source.corpus.manifest.streamed_parts
        if finished == 0:
            raise ConfigError(f"Corpus {name!r} is taken up by itself while it is prepared", got=name)
        if parts > known:
            raise ConfigError(f"Corpus {name!r} has {known} parts", got=parts)
        base = finished or self._plans[name].base_parts
        before = max([base, *(n for _, of, n in self.timeline.grown if of == name)])
        if parts > before:
            self._follow(self.timeline.with_parts(step, name, parts))

    def set_global_batch_size(self, size: int) -> None:
        """Change the rows per step from the next step on."""
        self._follow(self.timeline.with_batch_size(self.step, size))

    def set_sequence_length(self, length: int) -> None:
        """Change the tokens per row from the next step on."""
        self._follow(self.timeline.with_length(self.step, length))

    def skip(self, *, samples: range | None, steps: range | None, reason: str) -> None:
        """Leave out samples to come; those that are left out already may lie in the past."""
        if (samples is None) == (steps is None):
            raise UsageError("skip takes either samples or steps", got=(samples, steps))
        if steps is not None:
            if not isinstance(steps, range) or not steps or steps.step != 1:
                raise UsageError("steps must be a range of one step or more", got=steps)
            ids = self.timeline.samples_of(steps[0])[0], self.timeline.samples_of(steps[-1])[-1]
            samples = range(int(ids[0]), int(ids[1]) + 1)
        assert samples is not None
        if not isinstance(samples, range) or not samples or samples.step != 1 or samples.start < 0:
            raise UsageError("samples must be a range of one sample or more", got=samples)
        if samples.stop >= MOST_SAMPLES:
            raise UsageError("samples must be below 2^62", got=samples)
        first = self.timeline.first_sample(self.step)
        if not self.timeline.skips_all(samples.start, min(first, samples.stop)):
            raise UsageError(
                f"Samples before {first} were served already",
                got=samples,
                fix="Load a state from before them.",
            )
        self._follow(self.timeline.with_skip(Skip(samples.start, samples.stop, check_text("reason", reason))))

    def state_at(self, step: int) -> State:
        """Return the state after the steps before a step."""
        corpora = {
            name: describe(self.sources[name], plan, self.course, step=step)
            for name, plan in self._plans.items()
        }
        asked = self._wishes.asked(step, names=self.arguments["corpora"])
        return encode(Saved(step, self.timeline, asked, self._identity(), {**self._absent, **corpora}))

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Loader.load_state_dict`."""
        saved = decode(state)
        check_identity(saved, self._identity())
        named = {
            *saved.corpora,
            *self.arguments["corpora"],
        }  # not one that was added after the state was saved
        sources = {name: source for name, source in self.sources.items() if name in named}
        check_corpora(saved, sources)
        plans = {name: self._plan(source, saved.identity["longest"]) for name, source in sources.items()}
        for name in sources.keys() & saved.corpora.keys():
            plans[name] = as_saved(plans[name], saved.corpora[name])
        check_sizes(saved, sources, plans)
        new = {name: source for name, source in sources.items() if name not in saved.corpora}
        timeline = _with_appended(self._wishes.anew(saved, sources, plans), new, step=saved.step)
        self._follow(timeline, sources=sources, plans=plans, step=saved.step)
        self._absent = {name: dict(was) for name, was in saved.corpora.items() if name not in sources}

    def snapshot(self) -> Snapshot:
        """Return this run as it is; pickled, a few kilobytes."""
        paths = {name: source.path for name, source in self.sources.items()}
        return Snapshot(
            step=self.step, timeline=self.timeline, paths=paths, plans=self._plans, absent=self._absent
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Become what a run with the same arguments was when the snapshot was taken."""
        sources = {}
        for name, path in snapshot.paths.items():
            known = self.sources.get(name)
            source = known if known and known.path == path else self._opened(name, path)[name]
            parts = [
                snapshot.plans[name].base_parts,
                *(n for _, of, n in snapshot.timeline.grown if of == name),
            ]
            if len(source.corpus.manifest.part_ends) < max(parts):
                source.reopen()
            sources[name] = source
        self._follow(snapshot.timeline, sources=sources, plans=snapshot.plans, step=snapshot.step)
        self._absent = dict(snapshot.absent)

    @property
    def _longest(self) -> int:
        return next(iter(self._plans.values())).longest

    def _identity(self) -> dict[str, Any]:
        """Return what must be the same for the order to be; `longest` comes with a state."""
        arguments = self.arguments
        return {
            "seed": arguments["seed"],
            "packing": arguments["packing"],
            **({"overlong": arguments["overlong"]} if arguments["overlong"] else {}),
            "split": [arguments["split"], arguments["holdout"]],
            "longest": self._longest,
        }

    def _follow(
        self,
        timeline: Timeline,
        *,
        sources: dict[str, Source] | None = None,
        plans: dict[str, Plan] | None = None,
        step: int | None = None,
    ) -> None:
        """Go by a timeline from now on; what is None stays as it is."""
        sources = self.sources if sources is None else sources
        plans = self._plans if plans is None else plans
        step = self.step if step is None else step
        self.course = Course(timeline.settled(step), sources, plans)
        self.sources, self._plans, self.step = sources, plans, step

    def _opened(self, name: str, path: str | Path) -> dict[str, Source]:
        caps = {of: cap for of, cap in self.arguments["epochs"].items() if of == name}
        rule = {"rule": self.arguments["packing"], "overlong": self.arguments["overlong"]}
        return open_sources({name: path}, **rule, epochs=caps)

    def _plan(self, source: Source, longest: int) -> Plan:
        keys = ("seed", "split", "holdout", "sequence_length", "overlong")
        return plan_of(source, longest=longest, **{key: self.arguments[key] for key in keys})

    def _check_name(self, name: str) -> None:
        if name not in self.sources:
            raise ConfigError(
                "The loader has no such corpus", got=name, fix=nearest(name, list(self.sources))
            )


def _with_appended(timeline: Timeline, sources: Mapping[str, Source], *, step: int) -> Timeline:
    """Return a timeline in which streamed corpora are read with all that was appended to them."""
    for name, source in sources.items():
        if source.appended:
            timeline = timeline.with_parts(step, name, source.appended)
    return timeline
