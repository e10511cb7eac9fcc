"""What a saved run and a loader must have in common, and what is said where they differ."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.core.errors import CorpusChanged, StateMismatch
from penstock.data.course import Course
from penstock.data.source import Source
from penstock.data.state import Saved, damaged
from penstock.data.timeline import MOST_LENGTH, Timeline
from penstock.data.way import Plan


def describe(source: Source, plan: Plan, course: Course, *, step: int) -> dict[str, Any]:  # Any: JSON values
    """Return what makes a corpus's rows what they are: sizes and a fingerprint of what was begun of it.

    Equal on all ranks: of a corpus that is still being prepared, only the parts that the run has come to.
    """
    grown = [parts for _, name, parts in course.timeline.grown if name == source.name]
    if plan.streamed:
        parts = course.parts_begun(source.name, step)
        fingerprint = source.corpus.fingerprint_of(max([parts, *grown]))
        return {"streamed": True, "parts": parts, "fingerprint": fingerprint}
    return {
        "parts": plan.base_parts,
        **_sizes(source, plan, course.timeline),
        "fingerprint": source.corpus.fingerprint_of(max([plan.base_parts, *grown])),
    }


def check_sizes(saved: Saved, sources: Mapping[str, Source], plans: Mapping[str, Plan]) -> None:
    """Refuse a state of a version that cut a corpus into other blocks and lanes: its order was another.

    Raises:
        StateMismatch: with both sizes.
    """
    for name in sources.keys() & saved.corpora.keys():
        if not plans[name].streamed:
            ours = _sizes(sources[name], plans[name], saved.timeline)
            theirs = {key: saved.corpora[name].get(key) for key in ours}
            if ours != theirs:
                raise StateMismatch(
                    f"The loader state has corpus {name!r} in blocks and lanes {theirs}, ours are {ours}",
                    fix="Resume with the version of Penstock that saved it, or start a new run.",
                )


def _sizes(source: Source, plan: Plan, timeline: Timeline) -> dict[str, int]:
    """Return the geometry that a corpus has at the run's first sequence length."""
    plan = replace(plan, sequence_length=timeline.length[0][1])
    order = plan.whole(source.corpus, plan.base_parts, first=0).order
    geometry = order.geometry
    return {
        "T": order.num_tokens,
        "B": geometry.block_tokens,
        "K": geometry.blocks_per_pool,
        "V": geometry.lanes,
    }


def check_identity(saved: Saved, ours: Mapping[str, Any]) -> None:
    """Refuse a state whose order is keyed otherwise.

    Raises:
        StateMismatch: with both values.
    """
    longest = saved.identity.get("longest")
    if not isinstance(longest, int) or isinstance(longest, bool) or not 2 <= longest <= MOST_LENGTH:
        raise damaged("longest must be a sequence length", got=longest)
    for key, value in ours.items():
        if key != "longest" and saved.identity.get(key) != value:
            raise StateMismatch(
                f"The loader state has {key} = {saved.identity.get(key)!r}, this loader has {value!r}",
                fix="Resume with the settings of the saved run, or start a new run.",
            )


def check_corpora(saved: Saved, sources: Mapping[str, Source]) -> None:
    """Refuse other contents under the same name, and a corpus that is still needed and not there.

    Raises:
        CorpusChanged: with what differs.
        StateMismatch: with the name that is missing.
    """
    for name, was in saved.corpora.items():
        if name in sources:
            check_contents(name, sources[name], was, saved.timeline)
        elif saved.timeline.slots_at(saved.step).get(name):
            raise StateMismatch(
                f"The saved run trains on corpus {name!r}, which this loader does not have",
                fix="Name it in corpora; or take it out of the saved run with remove_corpus.",
            )


def check_contents(name: str, source: Source, was: Mapping[str, Any], timeline: Timeline) -> None:
    """Refuse a corpus that is not what it was; more parts than before are no difference.

    Raises:
        CorpusChanged: with what differs.
    """
    parts = max([was["parts"], *(parts for _, of, parts in timeline.grown if of == name)])
    if parts > len(source.corpus.manifest.part_ends):
        source.reopen()  # another rank saw more of it
        source.wait_for(parts)  # or it is being prepared anew
    corpus = source.corpus
    known = len(corpus.manifest.part_ends)
    streamed = corpus.manifest.streamed_parts is not None
    if bool(was.get("streamed")) != streamed:
        raise CorpusChanged(
            f"Corpus {name!r} was {'not ' if streamed else ''}one to be read while it is prepared when the "
            f"state was saved, and now it is{'' if streamed else ' not'}",
            fix="Restore the corpus, or start a new run.",
        )
    if parts > known or corpus.fingerprint_of(parts) != was["fingerprint"]:
        found = {"parts": known, "T": corpus.num_tokens, "fingerprint": corpus.fingerprint}
        before = {key: was[key] for key in found if key in was}
        changes = "; ".join(
            f"{key} was {before[key]}, is {found[key]}" for key in before if before[key] != found[key]
        )
        raise CorpusChanged(
            f"Corpus {name!r} is not the one the state was saved with: {changes}",
            fix="Restore the corpus, or start a new run.",
        )
