"""The `[ethernet]` section: how shards are gathered and gradients reduced on slow links; imports no torch."""

from dataclasses import dataclass, field
from typing import Literal

from penstock.core.config import INFINITE
from penstock.core.errors import ConfigError

MIB = 1 << 20

Gather = Literal["compute", "bfloat16", "int8", "float8"]
Reduce = Literal["float32", "bfloat16", "int8", "float8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EthernetConfig:
    """Hides communication behind compute, and saves it; see docs/ethernet.md for what each gives."""

    overlap: bool = True
    """Gather ahead and reduce behind while the device computes; exact, and on by default. false: as FSDP2
    does without being told: on CPUs every collective is waited for."""
    window_mib: float = field(default=0.0, metadata=INFINITE)
    """Gathers under way at once, in MiB of gathered parameters: enough to hide them, not so many that
    memory runs out. Never less than one block. 0: the two largest blocks. inf: no limit."""
    keep_mib: float = field(default=0.0, metadata=INFINITE)
    """Memory, in MiB a rank, for parameters that stay gathered through all micro-batches of a step and
    gradients that are summed whole and reduced once. What saves most bytes on the wire is kept first.
    0: nothing. inf: everything."""
    operations: int = 0
    """Operations that each collective is cut into, gloo only: several use several network cards.
    0: one for each card in GLOO_SOCKET_IFNAME."""

    gather: Gather = "compute"
    """How weights travel when shards are gathered: in the type of `compute`, or matrices in fewer bits. int8
    and float8 have a scale for each 128 neighbours, and weights are rounded to them at each gather. float8
    where precision.linear is float8_*: only the weights of those layers, a scale a row, and nothing is lost
    that they would not lose."""
    reduce: Reduce = "float32"
    """How gradients travel between ranks, those of shards and of copies; they are summed in float32. int8 and
    float8 have a scale for each 128 neighbours."""
    feedback: bool = False
    """Keep what rounding leaves out of a gradient, and add it to the next one. It takes two bytes for each
    parameter of the whole model on each rank: int8 trains without it."""

    def __post_init__(self) -> None:
        for name in ("window_mib", "keep_mib"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"ethernet.{name} must be at least 0", got=getattr(self, name))
        if not 0 <= self.operations <= 64:
            raise ConfigError("ethernet.operations must be from 0 to 64", got=self.operations)
        if self.reduce != "float32" and not self.overlap:
            raise ConfigError(
                "ethernet.reduce encodes the reductions of ethernet.overlap, which is off",
                got=self.reduce,
                fix="Leave one of them out.",
            )
        if self.feedback and self.reduce == "float32":
            raise ConfigError(
                "ethernet.feedback keeps what ethernet.reduce rounds away, which is nothing",
                got=self.reduce,
                fix="Set ethernet.reduce to 'int8' or 'float8', or leave feedback out.",
            )

    @property
    def window_bytes(self) -> float:
        """`window_mib` in bytes; infinity is one of them."""
        return self.window_mib * MIB

    @property
    def keep_bytes(self) -> float:
        """`keep_mib` in bytes; infinity is one of them."""
        return self.keep_mib * MIB
