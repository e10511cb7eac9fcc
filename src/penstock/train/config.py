"""The recipe: every knob of a training run, its meaning, unit and default; imports no torch."""

from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.core.errors import ConfigError
from penstock.models.llama.config import LlamaConfig
from penstock.parallel import layout
from penstock.parallel.compile_config import CompileConfig
from penstock.parallel.ethernet_config import EthernetConfig
from penstock.parallel.fit import check_fit
from penstock.parallel.layout import ParallelConfig
from penstock.parallel.recompute_plan import RecomputeConfig
from penstock.train.data_config import AdaptiveConfig, ChangeConfig, CorpusConfig, DataConfig, at_least
from penstock.train.guard_config import GuardConfig
from penstock.train.measure_config import MeasureConfig
from penstock.train.optim.config import BLOCK, OptimConfig, fits_blocks
from penstock.train.outer_config import OuterConfig
from penstock.train.precision import PrecisionConfig

__all__ = [
    "AdaptiveConfig",
    "ChangeConfig",
    "CorpusConfig",
    "DataConfig",
    "OptimConfig",
    "OuterConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "TrainConfig",
    "on_machines",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """What the run is."""

    dir: str
    """Folder of the run: checkpoints, metrics, the resolved recipe. Run again on it to resume."""
    steps: int
    """Optimizer steps in the whole run."""
    seed: int = 0
    """Keys the initial weights and the data order."""
    log_samples: bool = False
    """Log the ids and a checksum of every sample, for `penstock data audit`; about 20 bytes a sample."""

    def __post_init__(self) -> None:
        if not self.dir.strip():
            raise ConfigError("run.dir is empty", got=self.dir, fix="Name a folder, say runs/first.")
        at_least("run.steps", self.steps, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the run."""

    rule: Literal["cosine", "wsd", "constant"] = "cosine"
    """wsd: warm up, stay, decay linearly (Hu et al., "MiniCPM", 2024)."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    decay_steps: int = 0
    """wsd only: steps of the final decay."""
    final_share: float = 0.1
    """Last learning rate, as a share of the peak."""

    def __post_init__(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        at_least("schedule.decay_steps", self.decay_steps, 0)
        if not 0 <= self.final_share <= 1:
            raise ConfigError("schedule.final_share must be between 0 and 1", got=self.final_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfig:
    """Loss on held-out documents; needs data.holdout."""

    every: int = 0
    """Steps between validations; also after the last step. 0: never."""
    samples: int = 64
    """Rows to validate on, the same ones each time, at the sequence length the run begins with: of each
    corpus in proportion to its first weight, one at least; of one with fewer held-out rows, all of them."""

    def __post_init__(self) -> None:
        at_least("validate.every", self.every, 0)
        at_least("validate.samples", self.samples, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """What is saved and kept."""

    every: int = 1000
    """Steps between checkpoints; also after the last step and before a requested stop."""
    dir: str = ""
    """Where they go: a folder that all machines share, or an address of s3://, gs:// or az://. Empty: into
    the run's folder."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Those of every so many steps are kept for good; 0: none."""
    max_failures: int = 3
    """Saves that may fail in a row, on a full disk say, before the run stops; until then it goes on."""

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 1)
        at_least("checkpoint.keep", self.keep, 1)
        at_least("checkpoint.keep_every", self.keep_every, 0)
        at_least("checkpoint.max_failures", self.max_failures, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole recipe."""

    run: RunConfig
    model: LlamaConfig
    data: DataConfig
    optim: OptimConfig = field(default_factory=OptimConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    ethernet: EthernetConfig = field(default_factory=EthernetConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    validate: ValidateConfig = field(default_factory=ValidateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    plan: str = ""
    """auto: what [parallel], [recompute], [ethernet] and data.micro_batch_size leave open is planned for the
    machines that the run is on. A cluster.toml, or a name of `penstock plan`: for those. again: as auto, also
    where a run goes on that has a plan. Empty: the defaults of those keys. See docs/planner.md."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of gathered weights and activations; reductions are float32, shards as precision.weights says."""

    def __post_init__(self) -> None:
        length, context = self.data.longest, self.model.max_position_embeddings
        if length > context:
            where = "" if length == self.data.sequence_length else " in data.schedule"
            raise ConfigError(
                f"data.sequence_length {length}{where} is beyond model.max_position_embeddings {context}",
                fix="Lower the first or raise the second.",
            )
        if self.schedule.warmup_steps + self.schedule.decay_steps > self.run.steps:
            raise ConfigError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} and decay_steps "
                f"{self.schedule.decay_steps} exceed run.steps",
                got=self.run.steps,
                fix="Lower them, or train for more steps.",
            )
        if self.validate.every and not self.data.holdout:
            raise ConfigError("validate.every needs held-out data", fix="Set data.holdout, say to 0.01.")
        check_fit(self.parallel, self.model, lengths=self.data.lengths)
        self._check_outer()
        self._check_keep()
        if self.ethernet.gather != "compute":
            self._check_gather()
        if self.optim.rule == "adamw_8bit":
            self._check_moments()

    def _check_keep(self) -> None:
        """Refuse to keep what stays anyway."""
        if self.ethernet.keep_mib and self.parallel.pipeline > 1:
            raise ConfigError(
                "ethernet.keep_mib is not for pipelines: their ranks keep all blocks gathered and reduce "
                "gradients once a step in any case",
                got=self.ethernet.keep_mib,
                fix="Leave ethernet.keep_mib out, or set parallel.pipeline to 1.",
            )

    def _check_outer(self) -> None:
        """Refuse islands where there are none, and fragments that would be empty."""
        outer, blocks = self.outer, self.model.num_hidden_layers
        if outer.every and self.parallel.replicate == 1 and self.parallel.hierarchy != "hybrid":
            raise ConfigError(
                "outer.every is for copies of the model, and parallel.replicate is 1",
                got=outer.every,
                fix="Set parallel.replicate to the number of islands; or to -1, and parallel.shard to the "
                "ranks of one.",
            )
        if outer.min_islands and (not outer.every or self.parallel.replicate != -1):
            raise ConfigError(
                "outer.min_islands lets the number of islands change, and it is fixed",
                got=outer.min_islands,
                fix="Set outer.every, parallel.replicate to -1 and parallel.shard to the ranks of an island.",
            )
        if outer.fragments > blocks:
            raise ConfigError(
                f"outer.fragments must be at most the model's {blocks} blocks", got=outer.fragments
            )

    def _check_moments(self) -> None:
        """Refuse slices of matrices that cut a block of 8-bit moments."""
        model, ranks = self.model, self.parallel.tensor
        for width in (model.num_attention_heads * model.size_of_head, model.intermediate_size):
            if ranks > 1 and not fits_blocks(width // ranks, whole=width, rows=model.hidden_size):
                raise ConfigError(
                    f"optim.rule 'adamw_8bit' keeps a scale for each {BLOCK} columns, and parallel.tensor "
                    f"cuts {width} columns into {width // ranks} a rank",
                    fix="Use fewer tensor-parallel ranks, or optim.rule 'adamw'.",
                )

    def _check_gather(self) -> None:
        """Refuse what weights cannot be gathered in fewer bits with."""
        gather, after = self.ethernet.gather, self.parallel.reshard_after_forward
        if self.parallel.hierarchy == "hpz":
            raise ConfigError(
                f"ethernet.gather {gather!r} does not work with parallel.hierarchy 'hpz'",
                fix="Leave one of them out.",
            )
        if self.parallel.offload:
            raise ConfigError(
                f"ethernet.gather {gather!r} does not work with parallel.offload",
                got=True,
                fix="Leave one of them out.",
            )
        if not isinstance(after, bool):
            raise ConfigError(
                f"ethernet.gather {gather!r} needs parallel.reshard_after_forward to be true or false",
                got=after,
                fix="Set it to true, or leave ethernet.gather out.",
            )


def on_machines(config: TrainConfig, *, world_size: int, ranks_per_machine: int) -> TrainConfig:
    """Return a recipe whose layout is in numbers where it was left to the machines; see `parallel.layout`."""
    numbers = layout.on_machines(config.parallel, world_size=world_size, ranks_per_machine=ranks_per_machine)
    return replace(config, parallel=numbers)
