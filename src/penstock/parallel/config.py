"""The `[compile]` and `[ethernet]` sections of a recipe; imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

from penstock.core.config import INFINITE
from penstock.core.errors import ConfigError

MIB = 1 << 20

Gather = Literal["compute", "bfloat16", "int8", "float8"]
Reduce = Literal["float32", "bfloat16", "int8", "float8"]
Schedule = Literal["depth_first", "breadth_first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EthernetConfig:
    """Overlap and compression of communication; docs/explanation/ethernet.md has the effect of each key."""

    overlap: bool = True
    """Gather ahead and reduce in the background while the device computes; exact. false: FSDP2's default, in
    which every collective blocks on CPUs."""
    window_mib: float = field(default=0.0, metadata=INFINITE)
    """Maximum gathers in flight, in MiB of gathered parameters: enough to hide them, few enough to fit the
    memory. At least one block. 0: the two largest blocks. inf: no limit."""
    keep_mib: float = field(default=0.0, metadata=INFINITE)
    """Memory in MiB per rank for parameters that stay gathered through all micro-batches of a step, and for
    gradients that are accumulated unsharded and reduced once. Units that save most bytes on the wire come
    first. 0: nothing. inf: everything."""
    schedule: Schedule = "depth_first"
    """depth_first: each micro-batch passes through all blocks and back. breadth_first: each block processes
    all micro-batches of a step before the next block does, so it is gathered once for all forward and once
    for all backward passes and reduced once, overlapped with the compute of all micro-batches; but blocks
    keep the activations of all of them. The losses are the same. Not for pipelines, which have their own
    schedules."""
    operations: int = 0
    """Operations per collective, gloo only: several use several network cards. 0: one per card in
    GLOO_SOCKET_IFNAME."""

    gather: Gather = "compute"
    """Format of weights on the wire when shards are gathered: the dtype of `compute`, or compressed. int8 and
    float8 have a scale per 128 numbers, and weights are rounded to them at each gather. float8 with
    precision.linear = float8_*: only the weights of those layers, with a scale per row, without additional
    loss."""
    reduce: Reduce = "float32"
    """Format of gradients on the wire, between shards and between replicas; sums are in float32. int8 and
    float8 have a scale per 128 numbers."""
    feedback: bool = False
    """Error feedback: add the rounding error of a gradient to the next one. Takes two bytes per parameter of
    the whole model on each rank; int8 trains without it."""

    def __post_init__(self) -> None:
        for name in ("window_mib", "keep_mib"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"ethernet.{name} must be at least 0", got=getattr(self, name))
        if not 0 <= self.operations <= 64:
            raise ConfigError("ethernet.operations must be from 0 to 64", got=self.operations)
        if self.reduce != "float32" and not self.overlap:
            raise ConfigError(
                "ethernet.reduce needs ethernet.overlap, which is off",
                got=self.reduce,
                fix="Set ethernet.overlap to true, or leave ethernet.reduce out.",
            )
        if self.feedback and self.reduce == "float32":
            raise ConfigError(
                "ethernet.feedback needs a compressed ethernet.reduce",
                got=self.reduce,
                fix="Set ethernet.reduce to 'int8' or 'float8', or leave feedback out.",
            )

    @property
    def window_bytes(self) -> float:
        """`window_mib` in bytes; may be infinite."""
        return self.window_mib * MIB

    @property
    def keep_bytes(self) -> float:
        """`keep_mib` in bytes; may be infinite."""
        return self.keep_mib * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """torch.compile, block by block: all blocks of one shape share one compiled program."""

    enabled: bool = False
    """Compile blocks before the first step, for rows of one document and for packed ones; takes seconds to
    minutes, less if cached."""
    mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"
    """max-autotune: try several kernels per product, GPUs only; longer compilation."""
    cache: str = ""
    """Folder of compiled programs, shared by runs and ranks. Empty: `compiled` in Penstock's cache folder,
    unless TORCHINDUCTOR_CACHE_DIR is set."""


NOT_COMPILED = CompileConfig()
