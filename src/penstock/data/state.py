"""The saved state of a loader: small JSON with a checksum, and what must match when it is loaded.

Positions, not payloads: no data is saved, because sample k can be computed again. The state holds the number
of steps and samples, the change log (schedule/change_log.py), the settings of the loader that saved it, and
what determines the order: seed, packing, split, corpora. A checksum over all of it finds states that were
damaged or edited.
"""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.core import config
from penstock.core.errors import CorpusChanged, StateMismatch
from penstock.data.schedule.change_log import ChangeLog, Skip

if TYPE_CHECKING:
    from penstock.data.corpus_reader import CorpusReader
    from penstock.data.order.epochs import OrderConfig

VERSION = 4
_CHECKSUM = "checksum"
_IDENTITY = ("seed", "packing", "overlong", "split", "longest")

State = dict[str, Any]  # Any: JSON values


@dataclass(frozen=True, slots=True)
class SavedLoaderState:
    """A state, checked and read."""

    step: int
    """Batches handed to the training loop."""
    change_log: ChangeLog
    """Changes of settings up to that step."""
    asked: Mapping[str, Any]
    """Settings of the loader that saved it, to say what another one has otherwise."""
    identity: Mapping[str, Any]
    """Seed, packing, split, longest; what must match."""
    corpora: Mapping[str, Mapping[str, Any]]
    """By name, what each corpus was."""


def encode(saved: SavedLoaderState) -> State:
    """Return a state as JSON values."""
    change_log = saved.change_log.until(saved.step + 1)
    # Pairs and not a table: the order of the corpora lays the mixture out, and must survive sorted keys.
    mix = [[step, [list(pair) for pair in slots.items()], reason] for step, slots, reason in change_log.mix]
    state = {
        "v": VERSION,
        "step": saved.step,
        "samples": change_log.consumed_before(saved.step),
        "batch": [list(entry) for entry in change_log.batch],
        "length": [list(entry) for entry in change_log.length],
        "mix": mix,
        "skip": [[skip.start, skip.stop, skip.reason] for skip in change_log.skips],
        "grown": [list(entry) for entry in change_log.grown],
        "asked": deepcopy(dict(saved.asked)),
        **deepcopy(dict(saved.identity)),
        "corpora": {name: dict(corpus) for name, corpus in saved.corpora.items()},
    }
    return {**state, _CHECKSUM: config.fingerprint(state)}


def decode(state: State) -> SavedLoaderState:
    """Read a state; refuse one that no loader can have saved: it would serve other samples in silence.

    Raises:
        StateMismatch: another version, damaged, or no state.
    """
    if not isinstance(state, dict):
        raise damaged("it is not a dict", got=type(state).__name__)
    version = state.get("v")
    if type(version) is not int or version != VERSION:
        raise StateMismatch(
            "The loader state has another version",
            got=version,
            fix=f"This Penstock reads version {VERSION}. Resume with the Penstock that saved it.",
        )
    _check(state)
    return _read(state)


def damaged(what: str, *, got: object) -> StateMismatch:
    """Return the error of a state that cannot be one."""
    return StateMismatch(
        f"The loader state is damaged: {what}",
        got=got,
        fix="Restore it, or use another checkpoint; to change a run, tell its loader, not its state.",
    )


def _check(state: State) -> None:
    content = {key: value for key, value in state.items() if key != _CHECKSUM}
    try:
        found = config.fingerprint(content)
    except (TypeError, ValueError, RecursionError):
        raise damaged("it is not of JSON values", got=content) from None
    if state.get(_CHECKSUM) != found:
        raise damaged(f"its content has the checksum {found}", got=state.get(_CHECKSUM))


def _read(state: State) -> SavedLoaderState:
    step: int = state["step"]
    change_log = ChangeLog(
        batch=tuple((first, size) for first, size in state["batch"]),
        length=tuple((first, length) for first, length in state["length"]),
        mix=tuple((first, dict(slots), reason) for first, slots, reason in state["mix"]),
        skips=tuple(Skip(start, stop, reason) for start, stop, reason in state["skip"]),
        grown=tuple((first, name, parts) for first, name, parts in state["grown"]),
    )
    if (made := change_log.consumed_before(step)) != state["samples"]:
        raise damaged(f"its step and batch sizes make {made} samples", got=state["samples"])
    identity = {key: state[key] for key in _IDENTITY if key in state}
    return SavedLoaderState(step, change_log, state["asked"], identity, state["corpora"])


def check_sizes(
    saved: SavedLoaderState, sources: "Mapping[str, CorpusReader]", plans: "Mapping[str, OrderConfig]"
) -> None:
    """Refuse a state of a version that cut a corpus into other blocks and lanes: its order was another.

    Raises:
        StateMismatch: with both sizes.
    """
    for name in sources.keys() & saved.corpora.keys():
        if not plans[name].streamed:
            ours = _sizes(sources[name], plans[name], saved.change_log)
            theirs = {key: saved.corpora[name].get(key) for key in ours}
            if ours != theirs:
                raise StateMismatch(
                    f"The loader state has corpus {name!r} in blocks and lanes {theirs}, ours are {ours}",
                    fix="Resume with the version of Penstock that saved it, or start a new run.",
                )


def _sizes(source: "CorpusReader", plan: "OrderConfig", change_log: ChangeLog) -> dict[str, int]:
    """Return the geometry that a corpus has at the run's first sequence length."""
    plan = replace(plan, sequence_length=change_log.length[0][1])
    order = plan.whole(source.corpus, plan.base_parts, first=0).order
    geometry = order.geometry
    return {
        "T": order.num_tokens,
        "B": geometry.block_tokens,
        "K": geometry.blocks_per_pool,
        "V": geometry.lanes,
    }


def check_identity(saved: SavedLoaderState, ours: Mapping[str, Any]) -> None:
    """Refuse a state whose order is keyed otherwise.

    `overlong` unset is no difference: every document then fitted a row, or the loader would be refused.

    Raises:
        StateMismatch: with both values.
    """
    for key, value in ours.items():
        if key == "overlong" and key not in saved.identity:
            continue
        if key != "longest" and saved.identity.get(key) != value:
            raise StateMismatch(
                f"The loader state has {key} = {saved.identity.get(key)!r}, this loader has {value!r}",
                fix="Resume with the settings of the saved run, or start a new run.",
            )


def check_corpora(saved: SavedLoaderState, sources: "Mapping[str, CorpusReader]") -> None:
    """Refuse other contents under the same name.

    Raises:
        CorpusChanged: with what differs.
    """
    for name, was in saved.corpora.items():
        if name in sources:
            check_contents(name, sources[name], was, saved.change_log)


def check_needed(change_log: ChangeLog, step: int, sources: "Mapping[str, CorpusReader]") -> None:
    """Refuse to go on without a corpus of the present mixture.

    Raises:
        StateMismatch: with the name that is missing.
    """
    for name, count in change_log.slots_at(step).items():
        if count and name not in sources:
            raise StateMismatch(
                f"The saved run trains on corpus {name!r}, which this loader does not have",
                fix="Name it in corpora; or take it out with remove_corpus before the state is saved.",
            )


def check_contents(name: str, source: "CorpusReader", was: Mapping[str, Any], change_log: ChangeLog) -> None:
    """Refuse a corpus that is not what it was; more parts than before are no difference.

    Raises:
        CorpusChanged: with what differs.
    """
    parts = max([was["parts"], *(parts for _, of, parts in change_log.grown if of == name)])
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
