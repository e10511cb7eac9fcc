"""Engine configuration, with computed or neutral defaults; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal, get_args

from penstock.core.checks import check_whole, is_number
from penstock.core.dtypes import dtype_name
from penstock.core.errors import ConfigError

Weights = Literal["stored", "auto", "float32", "bfloat16", "int8", "int4", "float8"]
Activations = Literal["stored", "int8"]
Cache = Literal["auto", "int8"]
Compile = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of an engine; the defaults suit one model on one machine."""

    checkpoint: int | None = None
    """Step of the run's checkpoint to open; None: the newest."""
    device: str | None = None
    """Device, such as `cpu` or `cuda:1`; None: the first GPU if there is one, else the CPU."""
    weights: Weights = "stored"
    """Format of the weight matrices; 8- and 4-bit formats are quantized when a model opens; auto: the fastest
    on this machine whose answers are close to the stored ones.

    int8 and int4 are weight-only: activations stay exact. auto is int8 on CPUs with the C++ operators,
    with activations in bfloat16 if the CPU multiplies those; bfloat16, or else float32, on CPUs without them;
    and on GPUs the stored format, bfloat16 instead of float32."""
    activations: Activations = "stored"
    """Activations in products with int8 and int4 matrices; stored: as they are; int8: rounded to 8 bits, for
    CPUs with VNNI.

    Each token has its own scale. Rounding gains time where a step has many tokens, and changes answers."""
    compile: Compile = "auto"
    """CUDA graphs of decode steps, and torch.compile of the blocks; auto: both on one NVIDIA GPU, nothing
    elsewhere; on: also on CPUs, where compiled blocks are slower; off: neither.

    On GPUs blocks are compiled when the engine opens, and graphs are recorded after that. On CPUs steps run
    uncompiled until compilation has finished."""
    kernels: str = "auto"
    """Choice among kernels that compute the same: auto, reference, or a file of `penstock kernels --out`.

    auto: measured at a GPU's first start, in some seconds, and kept for it; on CPUs, the first of each list.
    reference: the first of each list, unmeasured. With one file, replicas on equal devices give the same
    bits."""
    tensor_parallel: int = 1
    """Number of processes (ranks) that share each layer."""
    max_sequences: int = 256
    """Maximum number of running sequences (answers being computed); others wait."""
    tokens_per_step: int | None = None
    """Maximum number of tokens computed in one step; None: computed from the device."""
    target_itl_ms: float = 200.0
    """Target inter-token latency in ms while prompts wait; smaller: smoother stream, later first tokens.

    A step takes at most this long, or twice the time of a step without prompts if that is longer
    (`scheduling.budget`; docs/explanation/inference.md has the curve)."""
    block_size: int = 16
    """Token positions per KV cache block."""
    cache: Cache = "auto"
    """Format of the KV cache; auto: the dtype of the activations; int8: quantized, about half the bytes of
    bfloat16.

    With int8 the same memory holds twice the tokens, and a step reads half."""
    cache_gib: float | None = None
    """Memory of the KV cache in GiB; None: computed from the free memory."""
    max_context: int | None = None
    """Maximum tokens of prompt and answer together; None: the model's context."""
    prefix_caching: bool = True
    """Keep KV blocks of finished requests until their memory is needed, for prompts with a common prefix;
    False: free the blocks of a request when it ends."""
    batch_invariant: bool = False
    """One kernel for all sizes of a step, so that no bit of an answer depends on other requests; on GPUs
    prompts and long answers take longer.

    Products on GPUs are computed for 64 tokens at a time, and single tokens attended by the kernel of
    prompts. On CPUs the C++ operators are so without it. Refused where it cannot be kept (docs/limits.md)."""
    drafts: str = "off"
    """Speculative decoding by draft tokens: off, ngram, or the folder of a speculator."""
    num_drafts: int = 4
    """Maximum number of draft tokens per sequence and step."""
    adapt_drafts: bool = True
    """Draft fewer tokens, or none, while measurements show that drafts cost more than they save."""
    trust_contents: bool = False
    """Names of special tokens in messages become those tokens, as in transformers: the author of a message,
    or the result of a tool, can then write any turn; False: they are plain text."""
    adapters: Mapping[str, Path | str] = field(default_factory=dict)
    """Adapter name in a request -> folder of the LoRA adapter."""
    ignored_keys: tuple[str, ...] = ()
    """Key of a Hugging Face folder's `config.json` to pass over, with a warning, though Penstock does not
    read it.

    Other keys that it does not know are refused, because they may change what the model computes. A key
    inside another is written `rope_scaling.NAME`."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no engine can be built with."""
        if isinstance(self.weights, str):
            object.__setattr__(self, "weights", dtype_name(self.weights))
        for name in ("tensor_parallel", "max_sequences", "block_size", "num_drafts"):
            check_whole(name, getattr(self, name), 1, fix="Leave it out for the default.")
        for name in ("tokens_per_step", "max_context"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, 1, fix="Leave it out to have it computed.")
        for name in ("target_itl_ms", "cache_gib"):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and 0 < value < inf):
                fix = "Leave it out to have it computed."
                raise ConfigError(f"{name} must be positive", got=value, fix=fix)
        self._check_words()
        if not isinstance(self.adapters, Mapping):
            raise ConfigError(
                "adapters must map names to folders", got=self.adapters, fix='Write {"name": "folder"}.'
            )
        self._check_activations()
        if self.cache not in get_args(Cache):
            raise ConfigError("cache must be auto or int8", got=self.cache, fix="Leave it out.")

    def _check_words(self) -> None:
        if self.compile not in get_args(Compile):
            raise ConfigError("compile must be auto, on or off", got=self.compile, fix="Leave it out.")
        if not isinstance(self.kernels, str | Path) or not str(self.kernels):
            raise ConfigError(
                "kernels must be auto, reference or a file", got=self.kernels, fix="Leave it out for auto."
            )
        if not isinstance(self.drafts, str | Path):
            raise ConfigError(
                "drafts must be off, ngram, or a folder", got=self.drafts, fix="Leave it out for off."
            )

    def _check_activations(self) -> None:
        if self.activations not in get_args(Activations):
            raise ConfigError("activations must be stored or int8", got=self.activations, fix="Leave it out.")
        if self.activations == "int8" and self.weights not in ("int8", "int4"):
            raise ConfigError(
                "activations are rounded in products with int8 and int4 matrices only",
                got=f"activations int8 with weights {self.weights}",
                fix="Set weights to int8 or int4, or leave activations out.",
            )
