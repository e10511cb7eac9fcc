"""The [tune] section of a recipe: what is learned on top of a model that was trained before; no torch."""

import math
from dataclasses import dataclass
from typing import Literal

from penstock.core.checks import whole_number
from penstock.core.errors import ConfigError
from penstock.models.llama.config import LlamaConfig
from penstock.nn.linear.adapter_config import (
    GROUP,
    MAX_RANK,
    OUTPUT_MATRIX,
    AdapterConfig,
    BaseWeights,
    layers_named,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """Tuning of the model of run.start_from; without this section, `penstock train` trains all weights."""

    method: Literal["full", "lora", "rslora", "dora"] = "full"
    """full: all weights. lora: they are frozen, and a product of two thin matrices is added to those of each
    linear layer (arXiv:2106.09685). rslora: its scale is alpha / sqrt(rank), for large ranks
    (arXiv:2312.03732). dora: lora, and the length of each row is learned too (arXiv:2402.09353); slower."""
    rank: int = 16
    """Rank of an adapter's two matrices; not for full."""
    alpha: float = 32.0
    """Scale of an adapter, divided by rank, or by its root with rslora. Twice the rank is usual."""
    layers: tuple[str, ...] | str = "all"
    """Layers with an adapter: "all" linear ones of the blocks, "attention", "mlp", or a list of these or of
    query, key, value, output, gate, up, down and unembed, the output matrix. Hugging Face's names, such as
    q_proj and lm_head, are read too. All of the blocks learn more than attention alone, also at the same
    number of parameters."""
    base: BaseWeights = "compute"
    """Storage of the frozen weights of the blocks' adapted layers. compute: the dtype of the recipe's
    `compute`. int8, int4: rounded as `penstock serve --weights` does, so that the adapter fits the model that
    is served."""
    base_sharding: Literal["auto", "sharded", "whole"] = "auto"
    """Place of the frozen weights. whole: every rank reads all of them once, and a step sends the adapter's
    gradients only. sharded: over the ranks, and gathered for each pass. auto: whole where they fit."""

    loss: Literal["next_token", "dpo", "ipo", "simpo", "kto", "distillation"] = "next_token"
    """next_token: cross entropy of the learned tokens. dpo (arXiv:2305.18290), ipo (arXiv:2310.12036) and
    simpo (arXiv:2405.14734, without a reference model): pairs of a chosen and a rejected answer. kto
    (arXiv:2402.01306): single answers, each wanted or not. distillation: divergence from a teacher's most
    likely tokens; see `penstock data teach`."""
    beta: float = 0.1
    """dpo, ipo, kto: how closely the model stays by the one it started from; a larger value is closer. simpo:
    scale of the rewards; 2 to 2.5 in its paper."""
    margin: float = 0.5
    """simpo: the reward by which the chosen answer should lead, the paper's gamma."""
    desirable_weight: float = 1.0
    """kto: weight of wanted answers. Keep weight times number of both kinds within a factor of 4/3."""
    undesirable_weight: float = 1.0
    """kto: weight of answers that are not wanted."""
    temperature: float = 1.0
    """distillation: divisor of the logits, as given to `penstock data teach`."""

    def __post_init__(self) -> None:
        for name in ("beta", "desirable_weight", "undesirable_weight", "temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"tune.{name} must be a number above 0",
                    got=getattr(self, name),
                    fix=f"Leave it out for {getattr(type(self)(), name)}.",
                )
        if not 0 <= self.margin < math.inf:
            raise ConfigError(
                "tune.margin must be a number from 0 on", got=self.margin, fix="Leave it out for 0.5."
            )
        if whole_number("tune.rank", self.rank) < 1:
            raise ConfigError(
                "tune.rank must be at least 1",
                got=self.rank,
                fix="8 to 64 are usual. To train all weights without an adapter, set tune.method to 'full'.",
            )
        if not self.alpha > 0:
            raise ConfigError("tune.alpha must be above 0", got=self.alpha, fix="Twice tune.rank is usual.")
        layers_named(self.layers, key="tune.layers")
        if self.method == "full" and self.base != "compute":
            raise ConfigError(
                "tune.base rounds weights that do not change, and tune.method 'full' changes all",
                got=self.base,
                fix="Leave tune.base out, or set tune.method to 'lora', 'rslora' or 'dora'.",
            )
        if self.base_sharding == "sharded" and self.base != "compute":
            raise ConfigError(
                f"tune.base {self.base!r} is kept whole on each rank: its rounded weights are not sharded",
                got=self.base_sharding,
                fix="Leave tune.base_sharding out, or tune.base.",
            )

    @property
    def is_preference(self) -> bool:
        """True if the loss learns from answers that are preferred to others, or wanted or not."""
        return self.loss in ("dpo", "ipo", "simpo", "kto")

    @property
    def has_reference(self) -> bool:
        """True if the loss compares with the model that the run started from."""
        return self.loss in ("dpo", "ipo", "kto")

    @property
    def adapter(self) -> AdapterConfig | None:
        """The adapter that is trained; None: all weights are."""
        if self.method == "full":
            return None
        layers = layers_named(self.layers, key="tune.layers")
        return AdapterConfig(
            method=self.method,
            rank=self.rank,
            alpha=self.alpha,
            layers=tuple(name for name in layers if name != OUTPUT_MATRIX),
            unembed=OUTPUT_MATRIX in layers,
            base=self.base,
        )

    def check_slices(self, model: LlamaConfig, *, ranks: int) -> None:
        """Refuse tensor parallelism that would cut a group of inputs that share a scale of 4-bit weights.

        Raises:
            ConfigError: the rounding would depend on the number of ranks.
        """
        adapter = self.adapter
        if adapter is None or adapter.base != "int4":
            return
        for name in adapter.layers:
            inputs = model.linear_shapes[name][1]
            is_cut = name in ("output", "down")  # between its inputs
            if is_cut and ranks > 1 and inputs // ranks % GROUP:
                raise ConfigError(
                    f"tune.base 'int4' has one scale for {GROUP} inputs of an output, and parallel.tensor "
                    f"cuts the {inputs} inputs of layer {name!r} into {inputs // ranks} a rank",
                    got=ranks,
                    fix="Set tune.base to 'int8', which may be cut anywhere, or parallel.tensor to 1.",
                )

    def _check_fused(self, model: LlamaConfig, adapter: AdapterConfig) -> None:
        """Refuse an adapter that could not be written where several layers are stored in one matrix."""
        for parts in model.family.tensors.fused_layers:
            adapted = [name for name in parts if name in adapter.layers]
            if adapter.has_magnitudes and adapted and len(adapted) < len(parts):
                raise ConfigError(
                    f"{model.model_type} models store {' and '.join(parts)} in one matrix, and dora adapts "
                    "all of its rows",
                    got=self.layers,
                    fix=f"Name {' and '.join(parts)} in tune.layers, or none of them.",
                )
            if self.rank * len(adapted) > MAX_RANK:
                raise ConfigError(
                    f"tune.rank is too large: {model.model_type} models store {' and '.join(adapted)} in one "
                    f"matrix, whose adapter is {len(adapted)} times that rank",
                    got=self.rank,
                    fix=f"Use at most {MAX_RANK // len(adapted)}; 8 to 64 are usual.",
                )

    def check_fit(self, model: LlamaConfig) -> None:
        """Refuse a rank that saves nothing over the matrices that it adapts, and a matrix that is not there.

        Raises:
            ConfigError: with the largest rank that is possible, or the layers that are there.
        """
        adapter = self.adapter
        if adapter is None:
            return
        if self.rank > MAX_RANK:
            raise ConfigError(
                "tune.rank is larger than any that is read again, to serve it or to merge it",
                got=self.rank,
                fix=f"Use at most {MAX_RANK}; 8 to 64 are usual.",
            )
        if adapter.unembed and model.tie_word_embeddings:
            raise ConfigError(
                f"tune.layers names {OUTPUT_MATRIX!r}, and this model has no output matrix of its own: it is "
                "the embedding",
                got=self.layers,
                fix='Leave it out: "all" are the linear layers of the blocks.',
            )
        if not adapter.layers:
            raise ConfigError(
                f"tune.layers names {OUTPUT_MATRIX!r} alone, and blocks that learn nothing are not supported",
                got=self.layers,
                fix=f'Name layers of the blocks too, or all of them: ["all", "{OUTPUT_MATRIX}"].',
            )
        self._check_fused(model, adapter)
        shapes = model.linear_shapes
        if adapter.unembed:
            shapes[OUTPUT_MATRIX] = model.vocab_size, model.hidden_size
        names = [*adapter.layers, *([OUTPUT_MATRIX] if adapter.unembed else [])]
        most, name = min((min(shapes[name]), name) for name in names)
        if self.rank > most:
            raise ConfigError(
                f"tune.rank is larger than the layer {name!r}, which is {' x '.join(map(str, shapes[name]))}",
                got=self.rank,
                fix=f"Use at most {most}; 8 to 64 are usual.",
            )
