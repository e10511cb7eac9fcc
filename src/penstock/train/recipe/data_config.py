"""The [data] section of a recipe: corpora, batches, planned changes; imports no torch."""

import re
from dataclasses import dataclass, field
from inspect import signature

from penstock.core.checks import at_least
from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.core.units import parse_count
from penstock.data.schedule.adaptive import POLICIES
from penstock.data.types import MAX_LENGTH, MAX_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """A corpus of the mixture."""

    path: str
    """Folder made by `penstock data prepare`, or another corpus specification (data/corpus/spec.py)."""
    weight: float | None = None
    """Share of samples, relative to the other corpora; absent for all corpora: in proportion to tokens."""
    epochs: int | None = None
    """Maximum passes over the corpus; a run that needs more is refused at the start. Absent: no limit."""
    columns: str = ""
    """Folder that `penstock data teach` made for this corpus, for tune.loss = "distillation"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeConfig:
    """A planned change; absent keys stay unchanged. Entries are in chronological order."""

    at_step: int | None = None
    """Steps taken before the change applies; or use at_tokens."""
    at_tokens: int | str | None = None
    """Tokens trained on before the change applies, such as "10B"; from the first step that begins with as
    many."""
    weights: dict[str, float] | None = None
    """Share of samples of every corpus, relative to the others; 0 leaves a corpus out."""
    ramp_steps: int | None = None
    """Steps over which the weights change linearly to the new ones; or use ramp_tokens."""
    ramp_tokens: int | str | None = None
    """The same in tokens."""
    global_batch_size: int | None = None
    """Rows per step over all ranks."""
    sequence_length: int | None = None
    """Tokens per row."""
    micro_batch_size: int | None = None
    """Rows per forward pass on one rank; absent: unchanged."""

    def __post_init__(self) -> None:
        if (self.at_step is None) == (self.at_tokens is None):
            raise ConfigError(
                "An entry of data.schedule needs exactly one of at_step and at_tokens",
                got={"at_step": self.at_step, "at_tokens": self.at_tokens},
            )
        at_least(0, "at_step in data.schedule", self.at_step or 0)
        if not self.says_anything:
            raise ConfigError(
                "An entry of data.schedule changes nothing",
                fix="Give it weights, global_batch_size, sequence_length or micro_batch_size.",
            )
        if self.ramp_steps is not None and self.ramp_tokens is not None:
            raise ConfigError("An entry of data.schedule has ramp_steps and ramp_tokens", fix="Keep one.")
        if self.weights is None and (self.ramp_steps or self.ramp_tokens):
            raise ConfigError("An entry of data.schedule has a ramp and no weights", fix="Only weights ramp.")
        at_least(0, "ramp_steps in data.schedule", self.ramp_steps or 0)
        for name, least in (("global_batch_size", 1), ("sequence_length", 2), ("micro_batch_size", 1)):
            value = getattr(self, name)
            at_least(least, f"{name} in data.schedule", least if value is None else value)
        for tokens in (self.at_tokens, self.ramp_tokens):
            token_count(0 if tokens is None else tokens)

    @property
    def says_anything(self) -> bool:
        """True if the entry changes anything."""
        sizes = (self.global_batch_size, self.sequence_length, self.micro_batch_size)
        return self.weights is not None or any(size is not None for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """Adaptive mixture: corpus weights that follow the losses; see docs/how-to/change-the-mixture.md."""

    policy: str = "none"
    """none, or a policy of data/schedule/adaptive.py: online_data_mixing."""
    every: int = 100
    """Steps between two decisions. Each adds a segment to the mixture, which the state keeps for ever."""
    warmup_steps: int = 0
    """Steps with the recipe's own weights before the first decision."""
    options: dict[str, float] = field(default_factory=dict)
    """Options of the policy, by name."""

    def __post_init__(self) -> None:
        at_least(1, "data.adaptive.every", self.every)
        at_least(0, "data.adaptive.warmup_steps", self.warmup_steps)
        if self.policy != "none":
            try:
                policy = POLICIES[self.policy]
            except UsageError as error:
                raise ConfigError(f"data.adaptive.policy is invalid: {error}") from None
            known = list(signature(policy).parameters)
            for name in self.options:
                if name not in known:
                    raise ConfigError(
                        f"Policy {self.policy} has no such option", got=name, fix=nearest(name, known)
                    )
            policy(**self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Corpora, batch sizes and data order."""

    corpora: dict[str, CorpusConfig]
    """Corpora by name; the name is part of the shuffle key, so renaming a corpus reshuffles it."""
    sequence_length: int
    """Tokens per row."""
    global_batch_size: int
    """Rows per step over all ranks."""
    micro_batch_size: int | None = None
    """Rows per forward pass on one rank; absent: the rank's whole share. Smaller values need less memory."""
    packing: str = "best_fit"
    """Packing of documents into rows: best_fit, concat or whole (docs/explanation/packing.md). Absent in a
    recipe over conversations: whole, and a new run over them may have no other."""
    overlong: str | None = None
    """With packing = "whole": truncate or drop documents longer than a row; absent: refuse them."""
    holdout: float = 0.0
    """Share of each corpus held out for validation, in whole documents."""
    num_workers: int = 1
    """Threads that prepare batches."""
    prefetch: int = 2
    """Batches prepared ahead."""
    schedule: tuple[ChangeConfig, ...] = ()
    """Planned changes: [[data.schedule]] entries."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    """Weights that follow the losses."""

    def __post_init__(self) -> None:
        if not self.corpora:
            raise ConfigError("data.corpora is empty", fix="Add [data.corpora.NAME] with a path.")
        at_least(2, "data.sequence_length", self.sequence_length, most=MAX_LENGTH)
        at_least(1, "data.global_batch_size", self.global_batch_size, most=MAX_ROWS)
        at_least(1, "data.micro_batch_size", 1 if self.micro_batch_size is None else self.micro_batch_size)
        at_least(0, "data.num_workers", self.num_workers, most=1024)
        at_least(0, "data.prefetch", self.prefetch, most=1024)
        weights = [corpus.weight for corpus in self.corpora.values()]
        if None in weights and any(weight is not None for weight in weights):
            raise ConfigError(
                "Some corpora have a weight and some have none", fix="Give all of them one, or none."
            )
        if self.is_adaptive and len(self.corpora) < 2:
            raise ConfigError("data.adaptive needs two corpora or more", got=list(self.corpora))
        if self.is_adaptive and any(change.weights for change in self.schedule):
            raise ConfigError(
                "data.adaptive sets the weights, and so does an entry of data.schedule",
                fix="Keep one of them.",
            )

    @property
    def is_adaptive(self) -> bool:
        """True if the mixture follows the losses of the corpora."""
        return self.adaptive.policy != "none"

    @property
    def lengths(self) -> list[int]:
        """All sequence lengths of the run."""
        later = (change.sequence_length for change in self.schedule)
        return [self.sequence_length, *(length for length in later if length is not None)]

    @property
    def longest(self) -> int:
        """Longest sequence length of the run."""
        return max(self.lengths)

    @property
    def weights(self) -> dict[str, float] | None:
        """Corpus weights by name; None: proportional to tokens."""
        known = {name: corpus.weight for name, corpus in self.corpora.items() if corpus.weight is not None}
        return known or None

    @property
    def epochs(self) -> dict[str, int]:
        """Maximum epochs by name, for the corpora that have one."""
        return {name: corpus.epochs for name, corpus in self.corpora.items() if corpus.epochs is not None}

    @property
    def columns(self) -> dict[str, str]:
        """Folders of columns by name, for the corpora that have one."""
        return {name: corpus.columns for name, corpus in self.corpora.items() if corpus.columns}

    @property
    def paths(self) -> dict[str, str]:
        """Corpus folders by name."""
        return {name: corpus.path for name, corpus in self.corpora.items()}


_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtb]?)", re.IGNORECASE)


def token_count(value: int | str) -> int:
    """Parse a number of tokens with an optional unit letter; B is a billion, as G is.

    Raises:
        ConfigError: not a number of tokens.

    >>> token_count("10B"), token_count("1.5M"), token_count(4096)
    (10000000000, 1500000, 4096)
    """
    match = _TOKENS.fullmatch(str(value).strip())
    if match is None or ("." in match[1] and not match[2]):
        raise ConfigError(
            "Not a number of tokens", got=value, fix='Write one such as 500000, "500M" or "10B".'
        )
    return parse_count(f"{match[1]}{match[2].lower().replace('b', 'g')}")
