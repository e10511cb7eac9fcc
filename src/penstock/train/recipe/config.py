"""The recipe: every key of a training run with its meaning, unit and default; imports no torch."""

import math
import re
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.core.checks import at_least, check_seconds
from penstock.core.errors import ConfigError
from penstock.models.decoder.config import DecoderConfig
from penstock.nn.linear.adapter_config import OUTPUT_MATRIX, AdapterConfig
from penstock.parallel import layout
from penstock.parallel.activation_checkpointing_plan import RecomputeConfig
from penstock.parallel.config import CompileConfig, EthernetConfig
from penstock.parallel.feasibility import check_fit
from penstock.parallel.layout import ParallelConfig
from penstock.train.recipe.data_config import AdaptiveConfig, ChangeConfig, CorpusConfig, DataConfig
from penstock.train.recipe.optim_config import BLOCK, OptimConfig, fits_blocks
from penstock.train.recipe.outer_config import OuterConfig
from penstock.train.recipe.samples_config import SamplesConfig
from penstock.train.recipe.tune_config import TuneConfig

__all__ = [
    "AdaptiveConfig",
    "ChangeConfig",
    "CorpusConfig",
    "DataConfig",
    "OptimConfig",
    "OuterConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "SamplesConfig",
    "TrainConfig",
    "TuneConfig",
    "on_machines",
]


MAX_EPOCHS = 10**6
"""Largest run.epochs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Folder, length and seed of the run."""

    dir: str
    """Folder of the run: checkpoints, metrics, the resolved recipe. Start again on it to resume."""
    steps: int = 0
    """Optimizer steps of the whole run; or give epochs, from which they follow."""
    epochs: float | None = None
    """Passes over the rows of all corpora together, in place of steps: such as 3, or 0.5. They are rounded up
    to whole steps. Several corpora need weights in proportion to their tokens."""
    seed: int = 0
    """Random seed of the initial weights and the data order."""
    start_from: str = ""
    """Weights to start from instead of random ones: a Hugging Face folder, a run, or one of its checkpoints.
    Leave [model] out: it is read from there. Tokens that the model lacks get new rows: the mean of the old
    ones."""
    start_step: int | None = None
    """Step of the checkpoint to start from, if start_from is a run; default: the newest at first."""
    start_hash: str = ""
    """Identity of those weights: found at the first start, and kept. Give it to insist on it."""
    start_vocab_size: int = 0
    """Token ids of those weights: found at the first start, and kept. An adapter trains the rows of those
    that the corpora have beyond."""
    device_hour_price: float = 0.0
    """Price of one device for an hour, in any currency; 0: unknown. `penstock launch` takes it from the
    cluster file. `penstock console` shows the cost of the run with it; nothing else reads it."""
    log_samples: bool = False
    """Log the ids and checksums of all samples, for `penstock data audit`; about 20 bytes per sample."""

    def __post_init__(self) -> None:
        if not self.dir.strip():
            raise ConfigError("run.dir is empty", got=self.dir, fix="Name a folder, say runs/first.")
        self._check_length()
        if not 0 <= self.device_hour_price < math.inf:
            raise ConfigError("run.device_hour_price must be 0 or more", got=self.device_hour_price)
        if not self.start_from and (self.start_hash or self.start_step is not None):
            raise ConfigError(
                "run.start_step and run.start_hash need run.start_from",
                got=self.start_hash or self.start_step,
                fix="Name the folder of the weights, or remove them.",
            )

    def _check_length(self) -> None:
        """Refuse a run without a length; the steps of one in epochs are 0 until its corpora are read."""
        if self.epochs is None and not self.steps:
            raise ConfigError(
                "run.steps must be at least 1 where run.epochs is not given",
                got=self.steps,
                fix="Write steps = N under [run], or epochs = N: passes over the corpora.",
            )
        if self.epochs is not None and not 0 < self.epochs <= MAX_EPOCHS:
            raise ConfigError(f"run.epochs must be above 0 and at most {MAX_EPOCHS:,}", got=self.epochs)
        at_least(0 if self.epochs else 1, "run.steps", self.steps, most=2**40)

    @property
    def length_key(self) -> str:
        """The key that sets the length of the run."""
        return "run.steps" if self.epochs is None else "run.epochs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate schedule."""

    rule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Course after the warm-up. cosine; linear: falls in equal steps to the end; wsd: stays, then decays
    linearly (Hu et al., "MiniCPM", 2024); constant."""
    warmup_steps: int = 0
    """Steps of linear warm-up. If warm-up and decay exceed run.steps, they take half of them, in the same
    ratio."""
    warmup_ratio: float = 0.0
    """Warm-up as a share of run.steps, rounded up, instead of warmup_steps."""
    decay_steps: int = 0
    """wsd only: steps of the final linear decay."""
    final_share: float = 0.1
    """Final learning rate, as a share of the peak; transformers and TRL end at 0."""

    def __post_init__(self) -> None:
        at_least(0, "schedule.warmup_steps", self.warmup_steps)
        at_least(0, "schedule.decay_steps", self.decay_steps)
        if not 0 <= self.warmup_ratio <= 1:
            raise ConfigError("schedule.warmup_ratio must be between 0 and 1", got=self.warmup_ratio)
        if self.warmup_ratio and self.warmup_steps:
            raise ConfigError(
                "schedule.warmup_steps and schedule.warmup_ratio are both given",
                got=f"{self.warmup_steps} and {self.warmup_ratio}",
                fix="Leave one of them out.",
            )
        if not 0 <= self.final_share <= 1:
            raise ConfigError("schedule.final_share must be between 0 and 1", got=self.final_share)

    def in_steps(self, steps: int) -> "ScheduleConfig":
        """Return the schedule with its warm-up in steps.

        >>> ScheduleConfig(warmup_ratio=0.1).in_steps(30).warmup_steps
        3
        """
        if not self.warmup_ratio:
            return self
        warmup = math.ceil(round(self.warmup_ratio * steps, 6))  # 0.1 * 30 is a little above 3
        return replace(self, warmup_steps=warmup, warmup_ratio=0.0)

    def fitted(self, steps: int) -> "ScheduleConfig":
        """Return the schedule for a run: warm-up and decay that exceed it take half of its steps.

        They keep their ratio, so that a short run tries every phase of a long one.

        >>> short = ScheduleConfig(rule="wsd", warmup_steps=50, decay_steps=200).fitted(12)
        >>> short.warmup_steps, short.decay_steps
        (1, 5)
        """
        whole = self.in_steps(steps)
        ramps = whole.warmup_steps + (whole.decay_steps if whole.rule == "wsd" else 0)
        if ramps <= steps:
            return whole
        half = steps // 2
        warmup = min(half, max(1, round(half * whole.warmup_steps / ramps))) if whole.warmup_steps else 0
        return replace(whole, warmup_steps=warmup, decay_steps=half - warmup)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidateConfig:
    """Validation loss on held-out documents; needs data.holdout."""

    every: int = 0
    """Steps between validations; the last step is also validated. 0: never."""
    samples: int = 64
    """Rows to validate on, the same ones each time, at the initial sequence length: from each corpus in
    proportion to its initial weight, at least one; all rows of a corpus that has fewer."""
    stop_after: int = 0
    """Early stop: validations in a row without improvement after which the run ends; 0: never. The checkpoint
    of the best validation is kept and named at the end."""
    min_improvement: float = 0.0
    """Nats per token by which the loss must fall below the best one to count as an improvement."""

    def __post_init__(self) -> None:
        at_least(0, "validate.every", self.every)
        at_least(1, "validate.samples", self.samples)
        at_least(0, "validate.stop_after", self.stop_after)
        if not self.min_improvement >= 0:
            raise ConfigError("validate.min_improvement must be 0 or more", got=self.min_improvement)
        if self.stop_after and not self.every:
            raise ConfigError(
                "validate.stop_after needs validations",
                got=self.stop_after,
                fix="Set validate.every, and data.holdout, say to 0.02.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    """Tasks of lm-eval on the live weights; needs the extra `eval`. [validate] is held-out loss."""

    tasks: tuple[str, ...] = ()
    """Task files, such as "./mine.yaml", or names of tasks that lm-eval ships. Nothing is downloaded: what is
    in Hugging Face's cache is found, after one `penstock eval --download`."""
    every: int = 0
    """Steps between evaluations; the last step is evaluated too. The first rank computes, the others wait."""
    shots: int | None = None
    """Examples in front of each question; default: as the task says, else 0. A task that says 0 keeps 0."""
    limit: int | None = 100
    """Questions of each task, the first ones. The first rank computes while the others wait."""
    chat_template: bool = False
    """Write questions as messages, by the run's chat template."""

    def __post_init__(self) -> None:
        at_least(0, "evaluate.every", self.every)
        if self.shots is not None:
            at_least(0, "evaluate.shots", self.shots)
        if self.limit is not None:
            at_least(1, "evaluate.limit", self.limit)
        if bool(self.tasks) != bool(self.every):
            raise ConfigError(
                "evaluate.tasks and evaluate.every need each other",
                got=f"{len(self.tasks)} tasks, every {self.every} steps",
                fix='Write both, say tasks = ["./mine.yaml"] and every = 500.',
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoint interval, location and retention."""

    every: int = 1000
    """Steps between checkpoints; also saved after the last step and before a requested stop."""
    dir: str = ""
    """Location of checkpoints: a folder that all machines share, or an s3://, gs:// or az:// address. Empty:
    the run's folder."""
    keep: int = 2
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Keep the checkpoints of multiples of this step for good; 0: none."""
    max_failures: int = 3
    """Consecutive saves that may fail, for instance on a full disk, before the run stops."""

    def __post_init__(self) -> None:
        at_least(1, "checkpoint.every", self.every)
        at_least(1, "checkpoint.keep", self.keep)
        at_least(0, "checkpoint.keep_every", self.keep_every)
        at_least(1, "checkpoint.max_failures", self.max_failures)


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardConfig:
    """Detection of bad steps, hangs and stragglers, and the response to them."""

    max_skips: int = 3
    """Steps out of 100 that may be skipped because their loss or gradient is not finite, or jumps. At one
    more, the run rewinds to the newest checkpoint before them, and leaves out the data in between."""
    max_rewinds: int = 2
    """Rewinds per process, each one checkpoint further back if there is one, before the run ends."""
    loss_spike: float = 0.0
    """A loss above this many times the median of the last 100 steps is a jump; 0: never. Off by default: a
    healthy run is better left alone."""
    gradient_spike: float = 0.0
    """The same for the gradient norm before clipping."""
    hang_s: float = 600.0
    """Seconds without a finished step after which every rank writes a hang report and the run ends. Four
    times as long for a process's first step, which may compile."""
    stop_within_s: float = 0.0
    """Seconds after a request to stop (SIGTERM, Ctrl-C) within which the checkpoint must be complete;
    otherwise the run exits without it, and resumes from the one before. Set it a little below the scheduler's
    grace period. 0: no limit."""
    straggler_every: int = 50
    """Steps between comparisons of the ranks' own times; 0: never. Costs one small sum over ranks."""
    straggler_ratio: float = 1.5
    """Warn of a rank whose own time is this many times the median rank's."""

    def __post_init__(self) -> None:
        check_seconds("guard.hang_s", self.hang_s)
        check_seconds("guard.stop_within_s", self.stop_within_s, zero="no limit")
        at_least(0, "guard.max_skips", self.max_skips)
        at_least(0, "guard.max_rewinds", self.max_rewinds)
        for name in ("loss_spike", "gradient_spike"):
            ratio = getattr(self, name)
            if ratio and not 1 < ratio < math.inf:
                raise ConfigError(f"guard.{name} must be above 1, or 0 for never", got=ratio)
        at_least(0, "guard.straggler_every", self.straggler_every)
        if not 1 < self.straggler_ratio < math.inf:
            raise ConfigError("guard.straggler_ratio must be above 1", got=self.straggler_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """Metric sinks besides metrics.jsonl, and steps to profile."""

    tensorboard: bool = False
    """Write event files into the run's folder `tensorboard`, for `tensorboard --logdir RUN`."""
    wandb_project: str = ""
    """Project of Weights & Biases to send metrics to, under the name of the run's folder; "": none."""
    metrics_port: int = 0
    """TCP port at which rank 0 serves the newest record to Prometheus, at /metrics; 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address that the port is opened on. The default is reached from this machine only; "0.0.0.0" from
    every network of it, without a password."""
    trace_steps: str = ""
    """Steps to trace, counted from 1, FIRST:PAST: "20:23" traces steps 20, 21 and 22. Each rank writes a file
    into the run's folder `traces`, for https://ui.perfetto.dev. Traced steps are slower."""
    memory_steps: str = ""
    """Steps whose memory allocations are recorded, likewise. On a GPU the file is a snapshot for
    https://pytorch.org/memory_viz, on a CPU a trace with allocations, bytes in use and shapes."""

    def __post_init__(self) -> None:
        if not 0 <= self.metrics_port < 65536:
            raise ConfigError(
                "measure.metrics_port is no TCP port",
                got=self.metrics_port,
                fix="Take one from 1024 to 65535, or 0 for none.",
            )
        for name in ("trace_steps", "memory_steps"):
            steps_of(getattr(self, name), name=f"measure.{name}")


Weights = Literal["float32", "bfloat16_master", "bfloat16_stochastic"]
Linear = Literal["compute", "float8_tensorwise", "float8_rowwise", "mxfp8"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Reduced precision of weights and products; docs/explanation/precision.md has costs and gains."""

    weights: Weights = "float32"
    """Storage of weights. float32: cast to `compute` when gathered. bfloat16_master: bfloat16, with a float32
    copy in the optimizer state. bfloat16_stochastic: bfloat16 without a copy; updates are rounded
    stochastically, so that small ones are not lost on average."""

    linear: Linear = "compute"
    """Precision of the blocks' linear layers, forward and backward: that of `compute`, or 8 bits with a scale
    per tensor, per row, or per 32 numbers of a row (mxfp8). Scales are powers of two. Emulated, and slower,
    except on GPUs with such instructions. There a layer stays in `compute` if it is too small to gain, by the
    rule of torchao: at most 1,024 outputs and 4,096 inputs; with a scale per row also at most 2,048 outputs,
    1,024 inputs, or 4,096 outputs of 2,048 inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A complete recipe."""

    run: RunConfig
    model: DecoderConfig
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
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    tune: TuneConfig | None = None
    plan: str = ""
    """auto: plan the keys that [parallel], [recompute], [ethernet] and data.micro_batch_size leave open, for
    the machines of the run. A cluster.toml, or a cluster name of `penstock plan`: plan for those. again: as
    auto, and plan again when resuming. Empty: the defaults of those keys. See docs/explanation/planner.md."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of gathered weights and activations; reductions are float32, shards as in precision.weights."""
    kernels: str = "auto"
    """Choice among kernels that compute the same. auto: measured at a device's first start, in some seconds,
    and kept for it; on CPUs, the first of each list. reference: the first of each list, unmeasured. Or a file
    that `penstock kernels --out FILE` wrote. A resumed run keeps its kernels, if this key has not changed."""

    def __post_init__(self) -> None:
        length, context = self.data.longest, self.model.max_position_embeddings
        if length > context:
            where = "" if length == self.data.sequence_length else " in data.schedule"
            raise ConfigError(
                f"data.sequence_length {length}{where} is above model.max_position_embeddings {context}",
                fix="Lower the first or raise the second."
                if not self.run.start_from
                else "Lower the first: the second is of the weights in run.start_from.",
            )
        for key, asked in (
            ("validate.every", self.validate.every),
            ("samples.heldout", self.samples.heldout),
        ):
            if asked and not self.data.holdout:
                raise ConfigError(f"{key} needs held-out data", fix="Set data.holdout, say to 0.01.")
        self._check_columns()
        check_fit(self.parallel, self.model, lengths=self.data.lengths)
        self._check_outer()
        self._check_keep()
        self._check_schedule()
        if self.ethernet.gather != "compute":
            self._check_gather()
        if self.optim.rule == "adamw_8bit":
            self._check_moments()
        if self.adapter is not None:
            self._check_adapter()
        if self.tune is not None and self.parallel.pipeline > 1:
            self._check_stages(self.tune)
        elif self.tune is not None:
            self.tune.frozen(self.model)
        if self.tune is not None and self.tune.is_preference:
            self._check_preference(self.tune)

    def _check_stages(self, tune: TuneConfig) -> None:
        """Refuse a pipeline with a stage that learns nothing: its outputs would have no gradients."""
        adapter, frozen = self.adapter, tune.frozen(self.model)
        stages, num_blocks = (
            self.parallel.pipeline * self.parallel.stages_per_rank,
            self.model.num_hidden_layers,
        )
        learned = {name for name in self.model.parameter_shapes if name not in frozen}
        if adapter is not None:
            learned = {
                name
                for name in learned
                if adapter.trains(name)
                or (name.startswith("layers.") and adapter.of(name.removesuffix(".weight")) is not None)
            }
        for stage in range(stages):
            blocks = {f"layers.{n}." for n in layout.blocks_of(stage, stages=stages, num_blocks=num_blocks)}
            ends = {"embed."} if stage == 0 else {"norm.", "unembed."} if stage == stages - 1 else set()
            if not any(name.startswith((*blocks, *ends)) for name in learned):
                raise ConfigError(
                    f"Stage {stage} of the pipeline learns nothing, and its outputs need gradients",
                    got=f"parallel.pipeline {self.parallel.pipeline}",
                    fix="Set parallel.pipeline to 1, or let tune leave something to learn in each stage.",
                )

    def _check_columns(self) -> None:
        """Refuse columns of a corpus that no objective reads."""
        for name, corpus in self.data.corpora.items():
            if corpus.columns and (self.tune is None or self.tune.loss != "distillation"):
                raise ConfigError(
                    f"data.corpora.{name}.columns is for tune.loss 'distillation'",
                    got=corpus.columns,
                    fix="Leave it out, or set tune.loss.",
                )

    def _check_preference(self, tune: TuneConfig) -> None:
        """Refuse data settings that would take the sides of a pair apart, or have no meaning for pairs."""
        data = self.data
        if data.packing != "whole" or data.overlong == "truncate":
            raise ConfigError(
                f"tune.loss {tune.loss!r} needs whole documents: the two answers of a pair stay together",
                got=f"data.packing {data.packing!r}, data.overlong {data.overlong!r}",
                fix='Set data.packing = "whole", and data.overlong = "drop" to leave out pairs longer than a '
                "row, which are then counted.",
            )
        if data.is_adaptive:
            raise ConfigError(
                f"data.adaptive follows losses of tokens; tune.loss {tune.loss!r} has losses of answers",
                got=data.adaptive.policy,
                fix="Leave data.adaptive out.",
            )
        if tune.has_reference and not self.run.start_from:
            raise ConfigError(
                f"tune.loss {tune.loss!r} compares with the model that the run starts from: there is none",
                fix="Set run.start_from to a Hugging Face folder or a run.",
            )

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapter that is trained on frozen weights; None: all weights are trained."""
        adapter = None if self.tune is None else self.tune.adapter_of(self.model)
        if adapter is None or not self.run.start_vocab_size:
            return adapter
        matrices = {"embed"} if self.model.tie_word_embeddings else {"embed", OUTPUT_MATRIX}
        if matrices <= set(adapter.saved):  # whole matrices have the new rows
            return adapter
        return replace(adapter, new_rows=self.model.vocab_size - self.run.start_vocab_size)

    def _check_adapter(self) -> None:
        """Refuse an adapter that does not fit the model, or what does not work with frozen weights."""
        assert self.tune is not None
        self.tune.check_fit(self.model)
        if self.adapter is not None and self.adapter.unembed and self.adapter.new_rows:
            raise ConfigError(
                "tune.layers names the output matrix, of which this run trains the "
                f"{self.adapter.new_rows} rows of new tokens: it cannot have both",
                got=self.tune.layers,
                fix="Leave 'unembed' out of tune.layers, or tokenise without new tokens.",
            )
        if not self.run.start_from:
            raise ConfigError(
                f"tune.method {self.tune.method!r} needs weights to adapt, and random ones are not worth it",
                fix="Set run.start_from to a Hugging Face folder or a run.",
            )
        if (
            self.adapter is not None
            and self.adapter.new_rows
            and {"embed", OUTPUT_MATRIX} & {*self.adapter.saved}
        ):
            raise ConfigError(
                "tune.modules_to_save names one of the two matrices that get rows for "
                f"{self.adapter.new_rows} new tokens",
                got=list(self.tune.modules_to_save),
                fix='Name both, ["embed_tokens", "lm_head"], or neither: new rows are trained in any case.',
            )
        if self.precision.linear != "compute":
            raise ConfigError(
                f"precision.linear {self.precision.linear!r} does not work with tune.method "
                f"{self.tune.method!r}: frozen weights are not multiplied in float8",
                got=self.precision.linear,
                fix="Leave precision.linear out; tune.base = 'int8' or 'int4' takes less memory.",
            )
        self.tune.check_slices(self.model, ranks=self.parallel.tensor)
        is_whole = self.tune.base_sharding == "whole" or self.tune.base != "compute"
        if self.parallel.offload and is_whole:
            raise ConfigError(
                "parallel.offload does not work with frozen weights that every rank holds whole",
                got=f"tune.base {self.tune.base!r}, tune.base_sharding {self.tune.base_sharding!r}",
                fix="Leave parallel.offload out, or set tune.base_sharding to 'sharded'.",
            )

    def _check_keep(self) -> None:
        """Refuse ethernet.keep_mib with pipelines, which keep all blocks anyway."""
        if self.ethernet.keep_mib and self.parallel.pipeline > 1:
            raise ConfigError(
                "ethernet.keep_mib does not apply to pipelines: ranks keep all blocks gathered and reduce "
                "gradients once a step in any case",
                got=self.ethernet.keep_mib,
                fix="Leave ethernet.keep_mib out, or set parallel.pipeline to 1.",
            )

    def _check_schedule(self) -> None:
        """Refuse ethernet.schedule with pipelines, which have their own."""
        if self.ethernet.schedule != "depth_first" and self.parallel.pipeline > 1:
            raise ConfigError(
                "ethernet.schedule does not apply to pipelines, which order micro-batches themselves",
                got=self.ethernet.schedule,
                fix="Leave ethernet.schedule out, or set parallel.pipeline to 1.",
            )

    def _check_outer(self) -> None:
        """Refuse islands without replicas, and empty fragments."""
        outer, blocks = self.outer, self.model.num_hidden_layers
        if outer.every and self.parallel.replicate == 1 and self.parallel.hierarchy != "hybrid":
            raise ConfigError(
                "outer.every needs replicas of the model, and parallel.replicate is 1",
                got=outer.every,
                fix="Set parallel.replicate to the number of islands; or to -1, and parallel.shard to the "
                "ranks of one.",
            )
        if outer.min_islands and (not outer.every or self.parallel.replicate != -1):
            raise ConfigError(
                "outer.min_islands needs a variable number of islands, and it is fixed",
                got=outer.min_islands,
                fix="Set outer.every, parallel.replicate to -1 and parallel.shard to the ranks of an island.",
            )
        if outer.fragments > blocks:
            raise ConfigError(
                f"outer.fragments must be at most the model's {blocks} blocks", got=outer.fragments
            )

    def _check_moments(self) -> None:
        """Refuse tensor-parallel slices that cut a block of 8-bit moments."""
        model, ranks = self.model, self.parallel.tensor
        for width in (model.num_attention_heads * model.size_of_head, model.intermediate_size):
            if ranks > 1 and not fits_blocks(width // ranks, whole=width, rows=model.hidden_size):
                raise ConfigError(
                    f"optim.rule 'adamw_8bit' keeps a scale for each {BLOCK} columns, and parallel.tensor "
                    f"cuts {width} columns into {width // ranks} a rank",
                    fix="Use fewer tensor-parallel ranks, or optim.rule 'adamw'.",
                )

    def _check_gather(self) -> None:
        """Refuse combinations with compressed gathers that do not work."""
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
    """Return a recipe with its layout resolved to numbers for the machines; see `parallel.layout`."""
    numbers = layout.on_machines(config.parallel, world_size=world_size, ranks_per_machine=ranks_per_machine)
    return replace(config, parallel=numbers)


_MAX_STEPS = 100  # a step of a large model takes tens of megabytes of trace


def steps_of(text: str, *, name: str) -> range:
    """Parse FIRST:PAST to steps counted from 1; "" is empty.

    Raises:
        ConfigError: not of that form, or more than 100 steps.

    >>> steps_of("20:23", name="measure.trace_steps"), len(steps_of("", name="measure.trace_steps"))
    (range(20, 23), 0)
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d{1,15}):(\d{1,15})", text)
    if match is None:
        raise ConfigError(f"{name} must be FIRST:PAST", got=text, fix='Example: "20:23" for steps 20 to 22.')
    first, past = int(match[1]), int(match[2])
    at_least(1, f"The first step of {name}", first)
    if not first < past <= first + _MAX_STEPS:
        raise ConfigError(f"{name} must name 1 to {_MAX_STEPS} steps", got=text, fix='Example: "20:23".')
    return range(first, past)


def weight_bytes_per_parameter(weights: Weights) -> int:
    """Return the bytes per weight of a rank's shard, a float32 copy included.

    >>> [weight_bytes_per_parameter(w) for w in ("float32", "bfloat16_master", "bfloat16_stochastic")]
    [4, 6, 2]
    """
    return {"float32": 4, "bfloat16_master": 6, "bfloat16_stochastic": 2}[weights]


def gradient_bytes_per_parameter(weights: Weights) -> int:
    """Return the bytes per gradient of a rank's shard.

    >>> gradient_bytes_per_parameter("bfloat16_stochastic")
    2
    """
    return 4 if weights == "float32" else 2
