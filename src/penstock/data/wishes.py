"""What a loader was made with, and what a saved run was told: which of the two holds on a resume."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import ConfigError
from penstock.data.arguments import slots_from
from penstock.data.holdout import Split
from penstock.data.mixture import slots_of
from penstock.data.schedule import Change, planned, planned_for
from penstock.data.source import Source
from penstock.data.state import Saved
from penstock.data.timeline import Timeline
from penstock.data.way import Plan, begin

Sources = Mapping[str, Source]
Plans = Mapping[str, Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Settings that may differ from those of the run that is resumed; what differs holds from there on."""

    weights: Mapping[str, float] | None
    global_batch_size: int
    sequence_length: int
    schedule: tuple[Change, ...]

    def from_the_start(self, sources: Sources, plans: Plans) -> Timeline:
        """Return the timeline of a new run."""
        mix = (0, self._slots(sources, plans), "recipe")
        timeline = Timeline(((0, self.global_batch_size),), ((0, self.sequence_length),), (mix,))
        return planned(timeline, self.schedule, list(sources))

    def asked(self, step: int, *, names: Iterable[str]) -> dict[str, Any]:  # Any: JSON values
        """Return what goes into the state, to be compared with on a resume.

        Args:
            names: of the corpora that the loader was made with.
        """
        here = planned_for(self.schedule, step)
        return {
            "weights": None if self.weights is None else slots_from(self.weights, list(names)),
            "global_batch_size": self.global_batch_size,
            "sequence_length": self.sequence_length,
            **({"planned": here} if here else {}),
        }

    def anew(self, saved: Saved, sources: Sources, plans: Plans) -> Timeline:
        """Return a saved timeline with what is wished for and the saved run did not."""
        step, timeline, was = saved.step, saved.timeline, dict(saved.asked)
        names = [name for name in sources if self.weights is None or name in self.weights]
        asked = self.asked(step, names=names)
        planned_before, planned_now = was.pop("planned", []), asked.pop("planned", [])
        if was.get("weights") != asked["weights"] or sources.keys() - saved.corpora.keys():
            timeline = timeline.with_slots(step, self._slots(sources, plans), "recipe")
        if was.get("global_batch_size") != self.global_batch_size:
            timeline = timeline.with_batch_size(step, self.global_batch_size)
        if was.get("sequence_length") != self.sequence_length:
            timeline = timeline.with_length(step, self.sequence_length)
        # What was planned for this very step the saved run took up; it may have been told otherwise since.
        again = was != asked or planned_before != planned_now
        changes = [c for c in self.schedule if c.step > step or (again and c.step == step)]
        return planned(timeline, changes, list(sources))

    def _slots(self, sources: Sources, plans: Plans) -> dict[str, int]:
        if self.weights is not None:
            return slots_from(self.weights, list(sources))
        if len(sources) == 1:
            return dict.fromkeys(sources, 1)
        if growing := [name for name in sources if plans[name].streamed]:
            raise ConfigError(
                f"Corpus {growing[0]!r} is still being prepared, so its share is not known",
                fix="Give weights.",
            )
        return slots_of({name: tokens_of(plans[name], source) for name, source in sources.items()})


def plan_of(
    source: Source,
    *,
    seed: int,
    sequence_length: int,
    longest: int,
    split: Split,
    holdout: float,
    overlong: str | None = None,
) -> Plan:
    """Return what keys and sizes the order of a corpus in a new run.

    Raises:
        ConfigError: the holdout leaves its split without a document.
    """
    manifest = source.corpus.manifest
    streamed = manifest.streamed_parts is not None
    plan = Plan(
        name=source.name,
        seed=seed,
        sequence_length=sequence_length,
        longest=longest,
        split=split,
        holdout=holdout,
        overlong=overlong,
        streamed=streamed,
        base_parts=0 if streamed else len(manifest.part_ends),
    )
    begin(plan, source.corpus)  # so that an empty split is refused here, not at the first batch
    return plan


def as_saved(plan: Plan, was: Mapping[str, Any]) -> Plan:
    """Return the plan of a corpus that a run began with, though there may be more of it now."""
    streamed = bool(was.get("streamed"))
    return replace(plan, streamed=streamed, base_parts=0 if streamed else was["parts"])


def tokens_of(plan: Plan, source: Source) -> int:
    """Return the tokens of a corpus's split, for its share of the mixture."""
    corpus = source.corpus
    return plan.whole(corpus, len(corpus.manifest.part_ends), first=0).space.num_tokens
