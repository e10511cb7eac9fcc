"""The [data] section of a recipe: corpora, batches, what changes on the way; imports no torch."""

import re
from dataclasses import dataclass, field
from inspect import signature

from penstock.core.errors import ConfigError, UsageError, nearest
from penstock.core.units import parse_count
from penstock.data.adaptive import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusConfig:
    """One corpus of the mixture."""

    path: str
    """Folder made by `penstock data prepare`, or whatever else names a corpus (see data/spec.py)."""
    weight: float | None = None
    """Share of samples, relative to the others; absent for all corpora: in proportion to tokens."""
    epochs: int | None = None
    """Most passes over it; the run is refused before it starts if it needs more. Absent: no cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeConfig:
    """A planned change; what is absent stays as it is. Entries are in the order they take hold."""

    at_step: int | None = None
    """Steps taken before it holds; or give at_tokens."""
    at_tokens: int | str | None = None
    """Tokens trained on before it holds, such as "10B"; from the first step that begins with as many."""
    weights: dict[str, float] | None = None
    """Share of samples of every corpus, relative to the others; 0 leaves one out."""
    ramp_steps: int | None = None
    """Steps over which the mixture goes over to the new weights, in straight lines; or give ramp_tokens."""
    ramp_tokens: int | str | None = None
    """The same in tokens."""
    global_batch_size: int | None = None
    """Rows per step over all ranks."""
    sequence_length: int | None = None
    """Tokens per row."""
    micro_batch_size: int | None = None
    """Rows per forward pass on one rank; absent: as before."""

    def __post_init__(self) -> None:
        if (self.at_step is None) == (self.at_tokens is None):
            raise ConfigError(
                "An entry of data.schedule needs at_step or at_tokens, one of them",
                got={"at_step": self.at_step, "at_tokens": self.at_tokens},
            )
        at_least("at_step in data.schedule", self.at_step or 0, 0)
        if not self.says_anything:
            raise ConfigError(
                "An entry of data.schedule changes nothing",
                fix="Give it weights, global_batch_size, sequence_length or micro_batch_size.",
            )
        if self.ramp_steps is not None and self.ramp_tokens is not None:
            raise ConfigError("An entry of data.schedule has ramp_steps and ramp_tokens", fix="Keep one.")
        if self.weights is None and (self.ramp_steps or self.ramp_tokens):
            raise ConfigError("An entry of data.schedule has a ramp and no weights", fix="Only weights ramp.")
        at_least("ramp_steps in data.schedule", self.ramp_steps or 0, 0)
        for name, least in (("global_batch_size", 1), ("sequence_length", 2), ("micro_batch_size", 1)):
            value = getattr(self, name)
            at_least(f"{name} in data.schedule", least if value is None else value, least)
        for tokens in (self.at_tokens, self.ramp_tokens):
            token_count(0 if tokens is None else tokens)

    @property
    def says_anything(self) -> bool:
        """Whether it changes anything."""
        sizes = (self.global_batch_size, self.sequence_length, self.micro_batch_size)
        return self.weights is not None or any(size is not None for size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """A mixture that follows the losses of the corpora; see docs/mixing.md."""

    policy: str = "none"
    """none, or a name in POLICIES of data/adaptive.py: online_data_mixing."""
    every: int = 100
    """Steps between two decisions. Each opens a segment of the mixture, which the state keeps for ever."""
    warmup_steps: int = 0
    """Steps of the recipe's own weights before the first decision."""
    options: dict[str, float] = field(default_factory=dict)
    """Numbers for the policy, by name."""

    def __post_init__(self) -> None:
        at_least("data.adaptive.every", self.every, 1)
        at_least("data.adaptive.warmup_steps", self.warmup_steps, 0)
        if self.policy != "none":
            try:
                policy = POLICIES[self.policy]
            except UsageError as error:
                raise ConfigError(f"data.adaptive cannot be: {error}") from None
            known = list(signature(policy).parameters)
            for name in self.options:
                if name not in known:
                    raise ConfigError(
                        f"Policy {self.policy} has no such option", got=name, fix=nearest(name, known)
                    )
            policy(**self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    corpora: dict[str, CorpusConfig]
    """By name; the name keys the order, so renaming a corpus reshuffles it."""
    sequence_length: int
    """Tokens per row."""
    global_batch_size: int
    """Rows per step over all ranks."""
    micro_batch_size: int | None = None
    """Rows per forward pass on one rank; absent: the rank's whole share. Smaller: less memory."""
    packing: str = "best_fit"
    """How documents are placed into rows: best_fit, concat or whole (docs/packing.md)."""
    overlong: str | None = None
    """With packing = "whole": "truncate" or "drop" documents longer than a row."""
    holdout: float = 0.0
    """Share of each corpus kept for validation, whole documents."""
    num_workers: int = 1
    """Threads that prepare batches."""
    prefetch: int = 2
    """Batches prepared ahead."""
    schedule: tuple[ChangeConfig, ...] = ()
    """What changes on the way: [[data.schedule]] entries."""
    adaptive: AdaptiveConfig = field(default_factory=AdaptiveConfig)
    """Weights that follow the losses."""

    def __post_init__(self) -> None:
        if not self.corpora:
            raise ConfigError("data.corpora is empty", fix="Add [data.corpora.NAME] with a path.")
        at_least("data.sequence_length", self.sequence_length, 2)
        at_least("data.global_batch_size", self.global_batch_size, 1)
        at_least("data.micro_batch_size", 1 if self.micro_batch_size is None else self.micro_batch_size, 1)
        at_least("data.num_workers", self.num_workers, 0)
        at_least("data.prefetch", self.prefetch, 0)
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
        """Whether the mixture follows the losses of the corpora."""
        return self.adaptive.policy != "none"

    @property
    def lengths(self) -> list[int]:
        """The sequence lengths the run comes to."""
        later = (change.sequence_length for change in self.schedule)
        return [self.sequence_length, *(length for length in later if length is not None)]

    @property
    def longest(self) -> int:
        """The largest of them."""
        return max(self.lengths)

    @property
    def weights(self) -> dict[str, float] | None:
        """Weights by name, or None for proportional ones."""
        known = {name: corpus.weight for name, corpus in self.corpora.items() if corpus.weight is not None}
        return known or None

    @property
    def epochs(self) -> dict[str, int]:
        """Caps on epochs by name, of the corpora that have one."""
        return {name: corpus.epochs for name, corpus in self.corpora.items() if corpus.epochs is not None}

    @property
    def paths(self) -> dict[str, str]:
        """Corpus folders by name."""
        return {name: corpus.path for name, corpus in self.corpora.items()}


_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtb]?)", re.IGNORECASE)


def token_count(value: int | str) -> int:
    """Return a number of tokens that may be written with a letter; B is a billion, as G is.

    Raises:
        ConfigError: it is no such number.

    >>> token_count("10B"), token_count("1.5M"), token_count(4096)
    (10000000000, 1500000, 4096)
    """
    match = _TOKENS.fullmatch(str(value).strip())
    if match is None or ("." in match[1] and not match[2]):
        raise ConfigError(
            "Not a number of tokens", got=value, fix='Write one such as 500000, "500M" or "10B".'
        )
    return parse_count(f"{match[1]}{match[2].lower().replace('b', 'g')}")


def at_least(name: str, value: int, least: int) -> None:
    """Refuse a number that is too small, with its key.

    Raises:
        ConfigError: it is.
    """
    if value < least:
        raise ConfigError(f"{name} must be at least {least}", got=value)
