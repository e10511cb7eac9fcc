"""Layout of ranks: degrees of each parallelism, pipeline stages, coordinates of ranks; no torch.

A rank has a coordinate on five axes. From the outermost, whose neighbours are far apart, to the innermost,
whose neighbours are on one machine:

    pipeline   ranks hold different blocks of the model
    replicate  ranks hold replicas and different rows; gradients are averaged once a step
    shard      ranks hold shards of each parameter and different rows (FSDP)
    context    ranks hold sequence slices of the same rows; they shard parameters like `shard`
    tensor     ranks hold slices of each matrix and process the same rows

Ranks that differ only on `context`, `tensor` or `pipeline` work on the same samples: to the loader they are
one data-parallel rank.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from penstock.core.errors import ConfigError

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
REST = -1

ContextRule = Literal["all_gather", "ulysses"]
Hierarchy = Literal["flat", "hybrid", "hpz"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Degrees of each parallelism: numbers of ranks. Their product is the total number of ranks."""

    shard: int = REST
    """FSDP: ranks over which parameters, gradients and optimizer state are sharded. -1: all that the other
    axes leave."""
    replicate: int = 1
    """Replicas of the sharded model (hybrid sharding); with shard = 1, plain data parallelism. -1: the
    rest."""
    tensor: int = 1
    """Tensor parallelism: ranks that share each matrix, and between matrices the tokens of a row. They
    communicate in every layer: keep them within one machine."""
    context: int = 1
    """Context parallelism: ranks that share each row, for rows too long for one."""
    context_rule: ContextRule = "all_gather"
    """Attention under context parallelism: all_gather keys and values (any number of heads), or ulysses,
    which exchanges heads for tokens (fewer bytes; the degree must divide the heads)."""
    pipeline: int = 1
    """Pipeline parallelism: ranks that share the blocks of the model."""
    stages_per_rank: int = 1
    """Pipeline stages per rank. More: less idle time, more messages; a rank's rows must then split into a
    multiple of `pipeline` micro-batches."""
    reshard_after_forward: bool | int = True
    """Free a block's gathered parameters after its forward pass and gather them again for its backward pass.
    false: keep them, half the gathers for the memory of a whole model. A number: keep them sharded over
    groups of that many neighbouring ranks, for instance those of one machine, so that the second gather stays
    inside."""
    hierarchy: Hierarchy = "flat"
    """Reduce traffic between machines, whose ranks are detected. hybrid: the ranks of a machine share the
    parameters, and machines hold replicas that are averaged once a step. hpz: all ranks share them, and the
    second gather of a block stays inside a machine, for the memory of one copy per machine."""
    offload: bool = False
    """Keep sharded parameters, gradients and optimizer state in host memory instead of the device's."""

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if degree < 1 and not (degree == REST and axis in ("shard", "replicate")):
                rest = ", or -1 for all remaining ranks" if axis in ("shard", "replicate") else ""
                raise ConfigError(f"parallel.{axis} must be 1 or more{rest}", got=degree)
        if self.stages_per_rank < 1 or (self.stages_per_rank > 1 and self.pipeline == 1):
            raise ConfigError(
                "parallel.stages_per_rank must be 1, or more with a pipeline", got=self.stages_per_rank
            )
        if self.shard == self.replicate == REST:
            raise ConfigError(
                "parallel.shard and parallel.replicate are both -1",
                fix="Only one can be the rest: set the other.",
            )
        if self.hierarchy != "flat":
            self._check_hierarchy()
        if self.reshard_after_forward is not True and self.reshard_after_forward is not False:
            self._check_groups(self.reshard_after_forward)

    def _check_hierarchy(self) -> None:
        name = "shard" if self.hierarchy == "hybrid" else "reshard_after_forward"
        if self.shard != REST or self.replicate != 1 or self.reshard_after_forward is not True:
            raise ConfigError(
                f"parallel.hierarchy {self.hierarchy!r} sets parallel.{name} itself",
                got=f"shard {self.shard}, replicate {self.replicate}, "
                f"reshard_after_forward {self.reshard_after_forward}",
                fix="Leave the three out, or parallel.hierarchy.",
            )
        if self.hierarchy == "hpz" and self.tensor * self.pipeline > 1:
            raise ConfigError(
                "parallel.hierarchy 'hpz' supports sharding only",
                got=f"tensor {self.tensor}, pipeline {self.pipeline}",
                fix="Leave tensor and pipeline at 1, or use 'hybrid'.",
            )

    def _check_groups(self, size: int) -> None:
        if size < 2:
            raise ConfigError(
                "parallel.reshard_after_forward must be true, false or a group of at least 2 ranks", got=size
            )
        if self.tensor > 1 or self.pipeline > 1 or self.replicate != 1:
            raise ConfigError(
                "parallel.reshard_after_forward can be a number only where all ranks share the parameters",
                got=size,
                fix="Use true or false, or leave tensor, pipeline and replicate at 1.",
            )


def on_machines(config: ParallelConfig, *, world_size: int, ranks_per_machine: int) -> ParallelConfig:
    """Return a flat config with the numbers that `hierarchy` stands for.

    Args:
        ranks_per_machine: equal on all machines.

    Raises:
        ConfigError: the ranks of a machine cannot be divided that way.

    >>> config = ParallelConfig(hierarchy="hybrid", tensor=2)
    >>> str(layout_of(on_machines(config, world_size=16, ranks_per_machine=8), world_size=16))
    'replicate 2 x shard 4 x tensor 2'
    """
    if config.hierarchy == "flat":
        return config
    flat = replace(config, hierarchy="flat")
    near = min(ranks_per_machine, world_size // config.pipeline)
    if config.hierarchy == "hpz":
        return flat if near in (1, world_size) else replace(flat, reshard_after_forward=near)
    inside = config.tensor * config.context
    if near % inside:
        raise ConfigError(
            f"parallel.tensor {config.tensor} x parallel.context {config.context} do not divide the {near} "
            "ranks of a machine, which parallel.hierarchy 'hybrid' keeps together",
            fix=f"Use degrees that divide {near}, or parallel.hierarchy 'flat'.",
        )
    return replace(flat, shard=near // inside, replicate=REST)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Resolved degrees of a run, and the arithmetic of ranks."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def world_size(self) -> int:
        """Total number of ranks."""
        return math.prod(self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_data(self) -> int:
        """Number of data-parallel ranks: parts into which the rows of a batch are divided."""
        return self.replicate * self.shard

    def place(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on each axis.

        >>> RankLayout(replicate=2, tensor=2).place(3)
        {'pipeline': 0, 'replicate': 1, 'shard': 0, 'context': 0, 'tensor': 1}
        """
        places = {}
        for axis in reversed(AXES):
            rank, places[axis] = divmod(rank, getattr(self, axis))
        return {axis: places[axis] for axis in AXES}

    def data_rank(self, rank: int) -> int:
        """Return the data-parallel rank to which a rank belongs.

        >>> [RankLayout(shard=2, tensor=2).data_rank(rank) for rank in range(4)]
        [0, 0, 1, 1]
        """
        place = self.place(rank)
        return place["replicate"] * self.shard + place["shard"]

    def sharing(self, rank: int) -> list[int]:
        """Return the ranks that work on the same rows as `rank`, itself included.

        >>> RankLayout(shard=2, tensor=2).sharing(2)
        [2, 3]
        """
        wanted = self.data_rank(rank)
        return [other for other in range(self.world_size) if self.data_rank(other) == wanted]

    def leads(self, rank: int) -> bool:
        """True if a rank is the first of those that work on the same rows."""
        return self.sharing(rank)[0] == rank

    def __str__(self) -> str:
        """Return the axes with a degree above 1, as `shard 4 x tensor 2`."""
        said = [f"{axis} {degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1]
        return " x ".join(said) or "one rank"


def layout_of(config: ParallelConfig, *, world_size: int) -> RankLayout:
    """Return the layout of a run on `world_size` ranks.

    Raises:
        ConfigError: the degrees do not multiply to it; with degrees that would.

    >>> str(layout_of(ParallelConfig(tensor=2), world_size=8))
    'shard 4 x tensor 2'
    """
    if world_size < 1:
        raise ConfigError("The number of ranks must be at least 1", got=world_size)
    degrees = {axis: getattr(config, axis) for axis in AXES}
    fixed = math.prod(degree for degree in degrees.values() if degree != REST)
    rest, left_over = divmod(world_size, fixed)
    shown = " x ".join(f"{axis} {d}" for axis, d in degrees.items() if d not in (1, REST)) or "1"
    if REST in degrees.values():
        if left_over or not rest:
            raise ConfigError(
                f"The degrees in parallel ({shown} = {fixed}) do not divide {world_size} ranks",
                fix=f"Start a multiple of {fixed} ranks, or lower a degree.",
            )
        degrees = {axis: rest if degree == REST else degree for axis, degree in degrees.items()}
    elif fixed != world_size:
        raise ConfigError(
            f"The degrees in parallel ({shown}) multiply to {fixed}, and there are {world_size} ranks",
            fix=f"Start {fixed} ranks, or set parallel.shard = -1 to share the model over all that are left.",
        )
    return _checked(RankLayout(**degrees), config.reshard_after_forward)


def _checked(layout: RankLayout, reshard_after_forward: bool | int) -> RankLayout:
    sharded = layout.shard * layout.context
    if not isinstance(reshard_after_forward, bool) and sharded % reshard_after_forward:
        raise ConfigError(
            f"parallel.reshard_after_forward does not divide the {sharded} ranks that share the parameters",
            got=reshard_after_forward,
            fix=f"Use a divisor of {sharded}, say the ranks of one machine, or true.",
        )
    return layout


def blocks_of(stage: int, *, stages: int, num_blocks: int) -> range:
    """Return the blocks of a stage: equal shares, earlier stages get one less if there is a remainder.

    >>> [list(blocks_of(stage, stages=2, num_blocks=5)) for stage in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return range(stage * num_blocks // stages, (stage + 1) * num_blocks // stages)


def in_progress(rank: int, *, ranks: int, per_rank: int) -> float:
    """Return the maximum number of micro-batches whose activations a pipeline rank keeps.

    One forward, one backward (1F1B): the first rank has started as many as there are ranks when the first one
    returns, the last rank one. Interleaved, it is counted in stages of a rank, so it may be a fraction.

    >>> [in_progress(rank, ranks=4, per_rank=1) for rank in range(4)]
    [4.0, 3.0, 2.0, 1.0]
    >>> [in_progress(rank, ranks=4, per_rank=2) for rank in range(4)]
    [5.5, 4.5, 3.5, 2.5]
    """
    later = ranks - 1 - rank
    return later + 1.0 if per_rank == 1 else ((per_rank - 1) * ranks + 2 * later + 1) / per_rank
