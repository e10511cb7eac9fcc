"""What a loader is in the middle of: its corpora, what it was told and when, and how far it is.

The course is made anew whenever the timeline changes, so as long as it is the same object nothing was told;
a change that is refused leaves everything as it was. Nothing here reads tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.data.arguments import at_least, check_table, number, open_sources, whole_number
from penstock.data.assign import check_divisible
from penstock.data.course import Course
from penstock.data.holdout import Split
from penstock.data.identity import check_corpora, check_identity, check_sizes, describe
from penstock.data.schedule import Change, checked
from penstock.data.source import Source
from penstock.data.state import Saved, State, decode, encode
from penstock.data.timeline import MOST_LENGTH, Timeline
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
    """The state of a loader: what it answers, is told (steering.py) and saves goes by this.

    Args:
        as of Loader.
    """

    arguments: dict[str, Any]  # Any: what Loader takes, by name
    """What the run was made with, checked: what a copy of it is made with."""
    sources: dict[str, Source]
    """The corpora by name."""
    plans: dict[str, Plan]
    """How each corpus's order is keyed and sized, by name."""
    absent: dict[str, Described]
    """Corpora that were taken out and are not here, as the state describes them."""
    course: Course
    """What the timeline makes of the corpora."""
    step: int
    """Batches handed out so far."""

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
        world_size: int,
    ) -> None:
        length = at_least(2, "sequence_length", sequence_length, most=MOST_LENGTH)
        size = at_least(1, "global_batch_size", global_batch_size)
        self.sources = open_sources(corpora, rule=packing, overlong=overlong, epochs=epochs)
        changes = checked(schedule, list(self.sources))
        world_size = whole_number("world_size", world_size)
        for rows in (size, *(change.global_batch_size or size for change in changes)):
            check_divisible(rows, world_size=world_size)
        self.arguments = {
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
            "world_size": world_size,
        }
        self.step = 0
        longest = max([length, *(change.sequence_length or 0 for change in changes)])
        self.plans = {name: self.plan_for(source, longest=longest) for name, source in self.sources.items()}
        self.absent = {}
        self._wishes = Wishes(
            weights=self.arguments["weights"],
            global_batch_size=size,
            sequence_length=length,
            schedule=changes,
        )
        timeline = self._wishes.from_the_start(self.sources, self.plans)
        self.follow(with_appended(timeline, self.sources, step=0))

    @property
    def timeline(self) -> Timeline:
        """What the run was told."""
        return self.course.timeline

    def epochs_by_corpus(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """Return how many passes over each corpus, as it is now, so many tokens are, padding counted."""
        per_epoch = {name: tokens_of(self.plans[name], source) for name, source in self.sources.items()}
        if self.arguments["overlong"] is not None:  # rows are padded, and documents left out
            rows = self.course.samples_per_epoch(self.step)
            per_epoch = {name: rows[name] * self.timeline.length_at(self.step) for name in self.sources}
        return {name: tokens[name] / per_epoch[name] for name in self.sources}

    def state_at(self, step: int) -> State:
        """Return the state after the steps before a step."""
        corpora = {
            name: describe(self.sources[name], plan, self.course, step=step)
            for name, plan in self.plans.items()
        }
        asked = self._wishes.asked(step, names=self.arguments["corpora"])
        return encode(Saved(step, self.timeline, asked, self._identity(), {**self.absent, **corpora}))

    def load_state_dict(self, state: State) -> None:
        """Continue from a state; see `Loader.load_state_dict`."""
        saved = decode(state)
        check_identity(saved, self._identity())
        named = {*saved.corpora, *self.arguments["corpora"]}  # not what was added after the state was saved
        sources = {name: source for name, source in self.sources.items() if name in named}
        check_corpora(saved, sources)
        longest = saved.identity["longest"]
        plans = {name: self.plan_for(source, longest=longest) for name, source in sources.items()}
        for name in sources.keys() & saved.corpora.keys():
            plans[name] = as_saved(plans[name], saved.corpora[name])
        check_sizes(saved, sources, plans)
        new = {name: source for name, source in sources.items() if name not in saved.corpora}
        timeline = with_appended(self._wishes.anew(saved, sources, plans), new, step=saved.step)
        self.follow(timeline, sources=sources, plans=plans, absent=saved.corpora, step=saved.step)

    def snapshot(self) -> Snapshot:
        """Return this run as it is; pickled, a few kilobytes."""
        paths = {name: source.path for name, source in self.sources.items()}
        return Snapshot(
            step=self.step, timeline=self.timeline, paths=paths, plans=self.plans, absent=self.absent
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Become what a run with the same arguments was when the snapshot was taken."""
        sources = {}
        for name, path in snapshot.paths.items():
            known = self.sources.get(name)
            source = known if known and known.path == path else self.opened(name, path)
            grown = [parts for _, of, parts in snapshot.timeline.grown if of == name]
            if len(source.corpus.manifest.part_ends) < max([snapshot.plans[name].base_parts, *grown]):
                source.reopen()
            sources[name] = source
        self.follow(
            snapshot.timeline,
            sources=sources,
            plans=snapshot.plans,
            absent=snapshot.absent,
            step=snapshot.step,
        )

    def follow(
        self,
        timeline: Timeline,
        *,
        sources: dict[str, Source] | None = None,
        plans: dict[str, Plan] | None = None,
        absent: Mapping[str, Mapping[str, Any]] | None = None,
        step: int | None = None,
    ) -> None:
        """Go by a timeline from now on; what is None stays as it is."""
        sources = self.sources if sources is None else sources
        plans = self.plans if plans is None else plans
        absent = self.absent if absent is None else absent
        step = self.step if step is None else step
        self.course = Course(timeline.settled(step), sources, plans)
        self.sources, self.plans, self.step = sources, plans, step
        self.absent = {name: dict(was) for name, was in absent.items() if name not in sources}

    def opened(self, name: str, path: str | Path) -> Source:
        """Return a corpus, opened as those of the run are."""
        caps = {of: cap for of, cap in self.arguments["epochs"].items() if of == name}
        rule = {"rule": self.arguments["packing"], "overlong": self.arguments["overlong"]}
        return open_sources({name: path}, **rule, epochs=caps)[name]

    def plan_for(self, source: Source, *, longest: int | None = None) -> Plan:
        """Return what keys and sizes the order of a corpus; `longest` is the run's where it is None."""
        keys = ("seed", "split", "holdout", "sequence_length", "overlong")
        longest = self._longest if longest is None else longest
        return plan_of(source, longest=longest, **{key: self.arguments[key] for key in keys})

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

    @property
    def _longest(self) -> int:
        return next(iter(self.plans.values())).longest


def with_appended(timeline: Timeline, sources: Mapping[str, Source], *, step: int) -> Timeline:
    """Return a timeline in which streamed corpora are read with all that was appended to them."""
    for name, source in sources.items():
        if source.appended:
            timeline = timeline.with_parts(step, name, source.appended)
    return timeline
