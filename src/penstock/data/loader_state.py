"""State of a loader: its corpora, its change log, its step, and how a saved state is resumed.

A change makes a new change log and a new sample index; a refused change leaves both untouched. So while the
sample index is the same object, nothing has changed. Nothing here reads tokens.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.core.checks import at_least, check_divisible, check_table, number, whole_number
from penstock.core.errors import ConfigError, PenstockError, StateMismatch, UsageError, nearest
from penstock.core.log import EventLog
from penstock.data.corpus_reader import CorpusReader, open_sources
from penstock.data.order.epochs import OrderConfig, begin
from penstock.data.order.holdout import Split
from penstock.data.packing import PADDING_RULES
from penstock.data.sample_index import SampleIndex
from penstock.data.schedule.change_log import Change, ChangeLog, checked, planned, planned_for
from penstock.data.schedule.mixture import slots_from, slots_of
from penstock.data.state import (
    SavedLoaderState,
    State,
    _sizes,
    check_corpora,
    check_identity,
    check_needed,
    check_sizes,
    decode,
    encode,
)
from penstock.data.types import MAX_LENGTH, MAX_ROWS

log = EventLog(__name__)

Described = dict[str, Any]  # Any: JSON values


OnChange = Literal["keep", "apply"]
"""Treatment of settings that differ from the saved run, on a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeChange:
    """Setting of a loader that differs from the run it resumed."""

    step: int
    """Step of the resume."""
    setting: str
    """`weights`, `global_batch_size`, `sequence_length`, `corpora`, or `planned` (for exactly this step)."""
    saved: Any  # Any: JSON values
    """Value in the saved run."""
    told: Any  # Any: JSON values
    """Value given to this loader."""
    applied: bool
    """True if it holds from this step on; False if the run continues with the saved value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSnapshot:
    """Copy of a run for another process. Unlike a saved state it includes planned changes."""

    step: int
    change_log: ChangeLog
    paths: dict[str, str | Path]
    plans: dict[str, OrderConfig]
    absent: dict[str, Described]
    addresses: dict[str, str]
    requested: Described | None


class LoaderState:
    """State of a loader: all its answers and batches follow from this.

    Args: as for `Loader`.
    """

    arguments: dict[str, Any]  # Any: what Loader takes, by name
    """Validated arguments of the run; a copy of it is made with them."""
    sources: dict[str, CorpusReader]
    """The corpora by name."""
    plans: dict[str, OrderConfig]
    """Shuffle key and sizes of each corpus, by name."""
    absent: dict[str, Described]
    """Descriptions, as in the state, of corpora that were removed and are not open."""
    addresses: dict[str, str]
    """Addresses of corpora that were added during the run."""
    resume_changes: tuple[ResumeChange, ...]
    """Settings in which this loader differs from the run it resumed last."""
    sample_index: SampleIndex
    """Lookup from sample ids to corpora and rows, for the present change log."""
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
        columns: Mapping[str, str | Path],
    ) -> None:
        length = at_least(2, "sequence_length", sequence_length, most=MAX_LENGTH)
        size = at_least(1, "global_batch_size", global_batch_size, most=MAX_ROWS)
        world_size = whole_number("world_size", world_size)
        check_divisible(size, world_size=world_size)
        self.sources = open_sources(
            corpora, rule=packing, overlong=overlong, epochs=epochs, ranks=world_size, columns=columns
        )
        for name in columns:
            if name not in corpora:
                raise ConfigError(
                    "columns names an unknown corpus", got=name, fix=nearest(name, list(corpora))
                )
        changes = checked(schedule, list(self.sources))
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
            "columns": dict(columns),
        }
        self.step = 0
        longest = max([length, *(change.sequence_length or 0 for change in changes)])
        self.plans = {name: self.plan_for(source, longest=longest) for name, source in self.sources.items()}
        self.absent, self.addresses, self.resume_changes = {}, {}, ()
        self._requested: Described | None = None  # settings of the saved run, if it continues with them
        self._settings = RequestedSettings(
            weights=self.arguments["weights"],
            global_batch_size=size,
            sequence_length=length,
            schedule=changes,
        )
        change_log = self._settings.from_the_start(self.sources, self.plans)
        self.follow(with_appended(change_log, self.sources, step=0))

    @property
    def change_log(self) -> ChangeLog:
        """Change log of the run."""
        return self.sample_index.change_log

    @property
    def members(self) -> list[str]:
        """Names of the corpora in the present mixture, without removed ones."""
        slots = self.change_log.slots_at(self.step)
        return [name for name in self.sources if name in slots]

    @property
    def is_far(self) -> bool:
        """True if a corpus is read over the network."""
        return any(source.is_far for source in self.sources.values())

    def epochs_by_corpus(self, tokens: Mapping[str, int]) -> dict[str, float]:
        """Return the epochs that `tokens` (padding included) make of each corpus in its present size."""
        rows, length = self.sample_index.samples_per_epoch(self.step), self.change_log.length_at(self.step)
        counts_rows = self.arguments["packing"] in PADDING_RULES
        per_epoch = {
            name: rows[name] * length
            if counts_rows or not self.plans[name].streamed
            else tokens_of(self.plans[name], source)
            for name, source in self.sources.items()
        }
        return {name: tokens[name] / per_epoch[name] for name in self.sources}

    def state_at(self, step: int) -> State:
        """Return the state after the steps before `step`."""
        corpora = {
            name: describe(self.sources[name], plan, self.sample_index, step=step)
            for name, plan in self.plans.items()
        }
        corpora = {**self.absent, **corpora}
        for name in self.addresses.keys() & corpora.keys():
            corpora[name] = {**corpora[name], "address": self.addresses[name]}
        requested = self._settings.as_state(step, names=self.arguments["corpora"])
        if self._requested is not None:
            here = {key: value for key, value in requested.items() if key == "planned"}
            requested = {**self._requested, **here}
        return encode(SavedLoaderState(step, self.change_log, requested, self._identity(), corpora))

    def load_state_dict(self, state: State, *, on_change: OnChange = "keep") -> None:
        """Continue from a state; see `Loader.load_state_dict`."""
        if on_change not in ("keep", "apply"):
            raise UsageError("on_change has no such choice", got=on_change, fix="Known: keep, apply.")
        saved, ours = decode(state), list(self.arguments["corpora"])
        check_identity(saved, self._identity())
        different = self._settings.differences(saved, ours)
        applies = on_change == "apply"
        if not applies:  # weights that are not given are not a difference
            different = [each for each in different if each[-1] is not None]
        settings = [setting for setting, _, _ in different] if applies else []
        mixed = [name for name, count in saved.change_log.slots_at(saved.step).items() if count]
        # Without corpora added to this loader after the state was saved.
        named = {*saved.corpora, *(ours if applies else ())}
        sources = {name: source for name, source in self.sources.items() if name in named}
        for name in ours:  # a corpus removed before it served a sample is not open any more
            if name in named and name not in sources:
                sources[name] = self.opened(name, self.arguments["corpora"][name])
        if not {"weights", "corpora"} & {*settings}:
            sources |= self._recorded(saved, [name for name in mixed if name not in sources])
        check_corpora(saved, sources)
        longest = saved.identity["longest"]
        plans = {name: self.plan_for(source, longest=longest) for name, source in sources.items()}
        for name in sources.keys() & saved.corpora.keys():
            plans[name] = as_saved(plans[name], saved.corpora[name])
        check_sizes(saved, sources, plans)
        if settings:
            change_log = self._settings.applied(
                saved, {name: sources[name] for name in ours}, plans, settings
            )
        else:
            change_log = self._settings.kept(saved, list(saved.change_log.slots_at(saved.step)))
        check_needed(change_log, saved.step, sources)
        size, world_size = change_log.batch_size_at(saved.step), self.arguments["world_size"]
        if size % world_size:
            raise ConfigError(
                f"The saved run continues with batches of {size} sequences, which cannot be divided over "
                f"{world_size} ranks",
                fix="Resume on other ranks, or with on_change='apply' and a divisible global_batch_size.",
            )
        new = {name: source for name, source in sources.items() if name not in saved.corpora}
        change_log = with_appended(change_log, new, step=saved.step)
        self.follow(change_log, sources=sources, plans=plans, absent=saved.corpora, step=saved.step)
        self.addresses = {name: was["address"] for name, was in saved.corpora.items() if "address" in was}
        self._requested = None if applies else {k: v for k, v in saved.asked.items() if k != "planned"}
        self.resume_changes = tuple(
            ResumeChange(step=saved.step, setting=setting, saved=was, told=given, applied=applies)
            for setting, was, given in different
        )
        for change in self.resume_changes:
            level = logging.INFO if applies else logging.WARNING
            done = "applied" if applies else "not applied: the run continues as saved (see on_change)"
            log.log(
                level,
                "resume_setting",
                "At step {step:,}, {setting} is given as {given} and was saved as {saved}: {outcome}",
                step=change.step,
                setting=change.setting,
                given=change.told,
                saved=change.saved,
                outcome=done,
            )

    def _recorded(self, saved: SavedLoaderState, names: Sequence[str]) -> dict[str, CorpusReader]:
        """Open corpora that were added to the saved run, at the addresses it recorded.

        Raises:
            StateMismatch: one cannot be opened.
        """
        found = {}
        for name in names:
            address = saved.corpora[name].get("address")
            if address is None:
                continue
            try:
                found[name] = self.opened(name, address)
            except PenstockError as error:
                raise StateMismatch(
                    f"The saved run trains on corpus {name!r}, which was added to it and cannot be opened: "
                    f"{error}",
                    fix=f"Name it in corpora at its present path: {{{name!r}: PATH}}.",
                ) from None
        return found

    def described(self, name: str) -> Described | None:
        """Return the description of a corpus, as in the state, also if it was removed; None if unknown."""
        if name in self.plans:
            return describe(self.sources[name], self.plans[name], self.sample_index, step=self.step)
        return self.absent.get(name)

    def snapshot(self) -> LoaderSnapshot:
        """Return a copy of this run for another process; a few kilobytes when pickled."""
        paths = {name: source.path for name, source in self.sources.items()}
        return LoaderSnapshot(
            step=self.step,
            change_log=self.change_log,
            paths=paths,
            plans=self.plans,
            absent=self.absent,
            addresses=self.addresses,
            requested=self._requested,
        )

    def restore(self, snapshot: LoaderSnapshot) -> None:
        """Restore a snapshot of a run with the same arguments."""
        sources = {}
        for name, path in snapshot.paths.items():
            known = self.sources.get(name)
            source = known if known and known.path == path else self.opened(name, path)
            grown = [parts for _, of, parts in snapshot.change_log.grown if of == name]
            if len(source.corpus.manifest.part_ends) < max([snapshot.plans[name].base_parts, *grown]):
                source.reopen()
            sources[name] = source
        self.follow(
            snapshot.change_log,
            sources=sources,
            plans=snapshot.plans,
            absent=snapshot.absent,
            step=snapshot.step,
        )
        self.addresses, self._requested = snapshot.addresses, snapshot.requested

    def follow(
        self,
        change_log: ChangeLog,
        *,
        sources: dict[str, CorpusReader] | None = None,
        plans: dict[str, OrderConfig] | None = None,
        absent: Mapping[str, Mapping[str, Any]] | None = None,
        step: int | None = None,
    ) -> None:
        """Use another change log, and other corpora, from now on; None leaves a value as it is."""
        sources = self.sources if sources is None else sources
        plans = self.plans if plans is None else plans
        absent = self.absent if absent is None else absent
        step = self.step if step is None else step
        self._check_lengths(change_log, sources, plans, step=step)
        self.sample_index = SampleIndex(change_log.settled(step), sources, plans)
        self.sources, self.plans, self.step = sources, plans, step
        self.absent = {name: dict(was) for name, was in absent.items() if name not in sources}

    def _check_lengths(
        self,
        change_log: ChangeLog,
        sources: Mapping[str, CorpusReader],
        plans: Mapping[str, OrderConfig],
        *,
        step: int,
    ) -> None:
        """Refuse documents longer than a present or planned row, unless `overlong` is set."""
        if self.arguments["packing"] not in PADDING_RULES or self.arguments["overlong"] is not None:
            return
        length = min(
            change_log.length_at(step), *(to for first, to in change_log.length if first > step), MAX_LENGTH
        )
        for name, source in sources.items():
            plan = replace(plans[name], sequence_length=length)
            plan.whole(source.corpus, len(source.corpus.manifest.part_ends), first=0)

    def opened(self, name: str, path: str | Path) -> CorpusReader:
        """Return an open corpus with the run's packing, cap on epochs and ranks."""
        caps = {of: cap for of, cap in self.arguments["epochs"].items() if of == name}
        rule = {"rule": self.arguments["packing"], "overlong": self.arguments["overlong"]}
        ranks, columns = self.arguments["world_size"], self.arguments["columns"]
        return open_sources({name: path}, **rule, epochs=caps, ranks=ranks, columns=columns)[name]

    def plan_for(self, source: CorpusReader, *, longest: int | None = None) -> OrderConfig:
        """Return the shuffle key and sizes of a corpus; `longest` None: the run's longest sequence.

        Raises:
            ConfigError: the holdout leaves its split without a document.
        """
        keys = ("seed", "split", "holdout", "sequence_length", "packing", "overlong")
        manifest = source.corpus.manifest
        streamed = manifest.streamed_parts is not None
        plan = OrderConfig(
            name=source.name,
            longest=self._max_length if longest is None else longest,
            streamed=streamed,
            base_parts=0 if streamed else len(manifest.part_ends),
            **{key: self.arguments[key] for key in keys},
        )
        begin(plan, source.corpus)  # refuses an empty split now instead of at the first batch
        return plan

    def _identity(self) -> dict[str, Any]:
        """Return the settings that determine the order; `longest` is stored with the state."""
        arguments = self.arguments
        return {
            "seed": arguments["seed"],
            "packing": arguments["packing"],
            **({"overlong": arguments["overlong"]} if arguments["overlong"] else {}),
            "split": [arguments["split"], arguments["holdout"]],
            "longest": self._max_length,
        }

    @property
    def _max_length(self) -> int:
        return next(iter(self.plans.values())).longest


def with_appended(change_log: ChangeLog, sources: Mapping[str, CorpusReader], *, step: int) -> ChangeLog:
    """Return a change log that includes the parts appended to streamed corpora."""
    for name, source in sources.items():
        if source.appended:
            change_log = change_log.with_parts(step, name, source.appended)
    return change_log


def address_of(path: str | Path) -> str:
    """Return the absolute path of a local corpus, or the address as it is."""
    text = str(path)
    return str(Path(text).absolute()) if Path(text).exists() else text


Readers = Mapping[str, CorpusReader]
Plans = Mapping[str, OrderConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedSettings:
    """Requested settings that may differ from those of the resumed run; see Loader.load_state_dict."""

    weights: Mapping[str, float] | None
    global_batch_size: int
    sequence_length: int
    schedule: tuple[Change, ...]

    def from_the_start(self, sources: Readers, plans: Plans) -> ChangeLog:
        """Return the change log of a new run."""
        mix = (0, self._slots(sources, plans), "recipe")
        change_log = ChangeLog(((0, self.global_batch_size),), ((0, self.sequence_length),), (mix,))
        return planned(change_log, self.schedule, list(sources))

    def as_state(self, step: int, *, names: Iterable[str]) -> dict[str, Any]:  # Any: JSON values
        """Return the requested settings for the state; a resume compares them.

        Args:
            names: corpora that the loader was made with.
        """
        here = planned_for(self.schedule, step)
        return {
            "weights": None if self.weights is None else slots_from(self.weights, list(names)),
            "global_batch_size": self.global_batch_size,
            "sequence_length": self.sequence_length,
            **({"planned": here} if here else {}),
        }

    def differences(
        self, saved: SavedLoaderState, names: Sequence[str]
    ) -> list[tuple[str, Any, Any]]:  # Any: values
        """Return (setting, saved value, our value) for each setting that differs from the saved run.

        A setting that the saved run changed later to our value is not a difference.

        Args:
            names: corpora that this loader was made with.
        """
        was, requested, now = dict(saved.asked), self.as_state(saved.step, names=names), saved.change_log
        in_force = {
            "weights": now.slots_at(saved.step),
            "global_batch_size": now.batch_size_at(saved.step),
            "sequence_length": now.length_at(saved.step),
            "planned": was.get("planned"),
        }
        different = [
            (setting, _shown(was.get(setting)), _shown(requested.get(setting)))
            for setting in in_force
            if not any(_same(each, requested.get(setting)) for each in (was.get(setting), in_force[setting]))
        ]
        new = [name for name in names if name not in saved.corpora]
        return [*different, *([("corpora", sorted(saved.corpora), list(names))] if new else [])]

    def kept(self, saved: SavedLoaderState, names: Sequence[str]) -> ChangeLog:
        """Return a saved change log with this loader's changes for later steps.

        Args:
            names: corpora of its mixture.
        """
        later = [change for change in self.schedule if change.step > saved.step]
        return planned(saved.change_log, later, names)

    def applied(
        self, saved: SavedLoaderState, sources: Readers, plans: Plans, settings: Collection[str]
    ) -> ChangeLog:
        """Return a saved change log with this loader's differing settings applied.

        Args:
            sources: corpora that this loader was made with.
        """
        step, change_log = saved.step, saved.change_log
        if "weights" in settings or "corpora" in settings:
            change_log = change_log.with_slots(step, self._slots(sources, plans), "recipe")
        if "global_batch_size" in settings:
            change_log = change_log.with_batch_size(step, self.global_batch_size)
        if "sequence_length" in settings:
            change_log = change_log.with_length(step, self.sequence_length)
        # The saved run already applied its changes planned for this very step, and may have changed them
        # since.
        later = [c for c in self.schedule if c.step > step or (settings and c.step == step)]
        return planned(change_log, later, list(change_log.slots_at(step)))

    def _slots(self, sources: Readers, plans: Plans) -> dict[str, int]:
        if self.weights is not None:
            return slots_from(self.weights, list(sources))
        if len(sources) == 1:
            return dict.fromkeys(sources, 1)
        if growing := [name for name in sources if plans[name].streamed]:
            raise ConfigError(
                f"Corpus {growing[0]!r} is still being prepared, so its share is unknown",
                fix="Give weights.",
            )
        return slots_of({name: tokens_of(plans[name], source) for name, source in sources.items()})


def _shown(setting: Any) -> Any:  # Any: a setting
    """Return weights as shares, for messages; any other setting as it is."""
    if not isinstance(setting, dict):
        return setting
    return {name: round(count / sum(setting.values()), 9) for name, count in setting.items()}


def _same(was: Any, now: Any) -> bool:  # Any: a setting
    """Return True if a setting is the same; unset and empty are the same."""
    return was == now or not (was or now)


def as_saved(plan: OrderConfig, was: Mapping[str, Any]) -> OrderConfig:
    """Return the config of a corpus with the number of parts that its saved run began with."""
    streamed = bool(was.get("streamed"))
    return replace(plan, streamed=streamed, base_parts=0 if streamed else was["parts"])


def tokens_of(plan: OrderConfig, source: CorpusReader) -> int:
    """Return the number of tokens in a corpus's split; the default weights are proportional to it."""
    corpus = source.corpus
    return plan.whole(corpus, len(corpus.manifest.part_ends), first=0).space.num_tokens


def describe(
    source: CorpusReader, plan: OrderConfig, sample_index: SampleIndex, *, step: int
) -> dict[str, Any]:  # Any: JSON values
    """Return the description of a corpus in the state: sizes, and a fingerprint of the parts begun.

    Equal on all ranks: of a corpus that is still being prepared, only the parts that the run has begun count.
    """
    grown = [parts for _, name, parts in sample_index.change_log.grown if name == source.name]
    if plan.streamed:
        parts = sample_index.parts_begun(source.name, step)
        fingerprint = source.corpus.fingerprint_of(max([parts, *grown]))
        return {"streamed": True, "parts": parts, "fingerprint": fingerprint}
    return {
        "parts": plan.base_parts,
        **_sizes(source, plan, sample_index.change_log),
        "fingerprint": source.corpus.fingerprint_of(max([plan.base_parts, *grown])),
    }
