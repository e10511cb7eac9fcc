"""How an engine is built: what a user may choose, each choice computed or neutral by default; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal, get_args

from penstock.core.errors import ConfigError
from penstock.core.ranges import check_whole, is_number

Weights = Literal["stored", "float32", "bfloat16", "int8", "int4", "float8"]
Cache = Literal["auto", "int8"]
Compile = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The choices; every default suits one model on one machine."""

    device: str | None = None
    """None: the first GPU if there is one, else the CPU."""
    weights: Weights = "stored"
    """What the matrices of the blocks are computed in; 8 and 4 bits are made when a model opens."""
    compile: Compile = "auto"
    """torch.compile; auto: where it was measured to pay, which is nowhere yet. No request waits for it."""
    tensor_parallel: int = 1
    """Processes that share each layer."""
    max_sequences: int = 256
    """Answers in the making at once; others wait."""
    tokens_per_step: int | None = None
    """Tokens computed in one step at most, whatever it may last; None: computed."""
    between_tokens_ms: float = 50.0
    """What a step may last while answers are in the making and prompts wait, or twice a step without prompts
    if that is more: smaller means an evener stream, and later first tokens (`scheduling.step_size`)."""
    block_size: int = 16
    """Positions of a block of the cache."""
    cache: Cache = "auto"
    """What keys and values are kept in; auto: as they are computed; int8: rounded, in about half the bytes of
    bfloat16, so that the same memory holds twice the tokens and a step reads half."""
    cache_gib: float | None = None
    """Memory of keys and values, in GiB; None: computed from what is free."""
    max_context: int | None = None
    """Tokens of prompt and answer at most; None: the model's context."""
    prefix_caching: bool = True
    """Keep the blocks of ended answers until their room is needed, for prompts that begin alike."""
    drafts: str = "off"
    """Where guessed tokens come from: off, ngram, or a folder with a draft model or a speculator."""
    num_drafts: int = 4
    """Guessed tokens a step, at most."""
    adapt_drafts: bool = True
    """Guess fewer, or none, while that is measured not to pay; False: always as many."""
    trust_contents: bool = False
    """Names of special tokens in messages become those tokens, as in transformers: who writes a message can
    then write any turn. False: they are text."""
    adapters: Mapping[str, Path | str] = field(default_factory=dict)
    """Name a request gives -> folder of a LoRA adapter."""

    def __post_init__(self) -> None:
        """Refuse what no engine can be built with."""
        for name in ("tensor_parallel", "max_sequences", "block_size", "num_drafts"):
            check_whole(name, getattr(self, name), 1, fix="Leave it out for the default.")
        for name in ("tokens_per_step", "max_context"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 1, fix="Leave it out to have it computed.")
        for name in ("between_tokens_ms", "cache_gib"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < inf):
                fix = "Leave it out to have it computed."
                raise ConfigError(f"{name} must be positive", got=value, fix=fix)
        if self.compile not in get_args(Compile):
            raise ConfigError("compile must be auto, on or off", got=self.compile, fix="Leave it out.")
        if not isinstance(self.drafts, str | Path):
            raise ConfigError(
                "drafts must be off, ngram, or a folder", got=self.drafts, fix="Leave it out for off."
            )
        if not isinstance(self.adapters, Mapping):
            raise ConfigError(
                "adapters must be names with folders", got=self.adapters, fix='Write {"name": "folder"}.'
            )
        if self.cache not in get_args(Cache):
            raise ConfigError("cache must be auto or int8", got=self.cache, fix="Leave it out.")
