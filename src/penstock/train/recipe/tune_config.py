"""The [tune] section of a recipe: what is learned on top of a model that was trained before; no torch."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from penstock.core.checks import whole_number
from penstock.core.errors import ConfigError, nearest
from penstock.models.decoder.config import DecoderConfig
from penstock.nn.linear.adapter_config import (
    GROUP,
    LINEAR_LAYERS,
    MAX_RANK,
    MIN_RATE,
    OUTPUT_MATRIX,
    AdapterConfig,
    BaseWeights,
    is_excluded,
    is_group_or_layer,
    is_named,
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
    dropout: float = 0.0
    """Share of inputs that an adapter does not see in a training step (lora_dropout of PEFT), from 0 to below
    1. Masks are functions of seed, step, layer, sample and position: the same ones on any number of ranks,
    after a resume, and where activations are recomputed."""
    layers: tuple[str, ...] | str = "all"
    """Layers with an adapter: "all" linear ones of the blocks, "attention", "mlp", or a list of these or of
    query, key, value, output, gate, up, down and unembed, the output matrix. Hugging Face's names, such as
    q_proj and lm_head, are read too. A text with other characters than a name has is a regular expression of
    whole names, as target_modules of PEFT: ".*layers.[0-3].self_attn.(q|v)_proj". All of the blocks learn
    more than attention alone, also at the same number of parameters."""
    layers_to_transform: tuple[int, ...] = ()
    """Blocks with an adapter, counted from 0; empty: all."""
    exclude_modules: tuple[str, ...] = ()
    """Layers without an adapter: last parts of names, such as "down_proj" or "layers.0.mlp.up_proj", or
    regular expressions of whole names."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained whole together with the adapter, by consecutive parts of their names:
    "embed_tokens", "lm_head", "norm", "input_layernorm", "mlp"."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Other ranks for some layers, by a regular expression of the last parts of their names, as in PEFT."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Other values of alpha for some layers, likewise."""
    freeze: tuple[str, ...] = ()
    """full: parameters that do not change, by regular expressions of consecutive parts of their names:
    "embed_tokens", "layers.[0-7]", "mlp", "input_layernorm.weight"."""
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
        self._check_patterns()
        self._check_adapter_only()
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

    def _check_adapter_only(self) -> None:
        """Refuse a dropout that is no share, and keys of adapters where there is none."""
        if self.dropout and not MIN_RATE <= self.dropout <= 1 - MIN_RATE:
            raise ConfigError(
                f"tune.dropout must be 0, or from {MIN_RATE:g} to {1 - MIN_RATE:g}",
                got=self.dropout,
                fix="0.05 and 0.1 are usual.",
            )
        if self.modules_to_save and self.method == "full":
            raise ConfigError(
                "tune.modules_to_save is for adapters: tune.method 'full' trains all modules whole",
                got=list(self.modules_to_save),
                fix="Leave it out; tune.freeze leaves parameters as they are.",
            )
        if self.dropout and self.method == "full":
            raise ConfigError(
                "tune.dropout is of an adapter's inputs, and tune.method 'full' has no adapter",
                got=self.dropout,
                fix="Leave it out, or set tune.method to 'lora', 'rslora' or 'dora'.",
            )

    def _check_patterns(self) -> None:
        """Refuse patterns that are no regular expressions, and what has no meaning for the method."""
        if not self.pattern:
            layers_named(self.layers, key="tune.layers")
        for name, texts in (
            ("layers", [self.pattern]),
            ("exclude_modules", self.exclude_modules),
            ("rank_pattern", self.rank_pattern),
            ("alpha_pattern", self.alpha_pattern),
            ("freeze", self.freeze),
        ):
            _check_expressions(texts, key=f"tune.{name}")
        if self.freeze and self.method != "full":
            raise ConfigError(
                f"tune.freeze is for tune.method 'full': {self.method!r} freezes all weights",
                got=list(self.freeze),
                fix="Leave it out; tune.layers and tune.layers_to_transform choose what an adapter changes.",
            )
        for layer, rank in self.rank_pattern.items():
            if not isinstance(rank, int) or rank < 1:
                raise ConfigError("tune.rank_pattern must have whole ranks from 1", got=f"{layer}: {rank}")
        for layer, alpha in self.alpha_pattern.items():
            if not 0 < alpha < math.inf:
                raise ConfigError("tune.alpha_pattern must have numbers above 0", got=f"{layer}: {alpha}")

    @property
    def pattern(self) -> str:
        """The regular expression in `layers`; "": it has names."""
        is_name = not isinstance(self.layers, str) or re.fullmatch(r"[A-Za-z_-]*", self.layers)
        return "" if is_name or is_group_or_layer(str(self.layers)) else str(self.layers)

    def frozen(self, model: DecoderConfig) -> frozenset[str]:
        """Return the names of the parameters that do not change in a run that tunes without an adapter.

        Raises:
            ConfigError: a pattern fits no parameter, or nothing is left to learn.
        """
        theirs = {ours: stored.tensor for ours, stored in model.stored_rows.items()}
        found = set[str]()
        for pattern in self.freeze:
            inside = re.compile(rf"(.*\.)?({pattern})(\..*)?")
            fitting = {
                ours for ours, name in theirs.items() if inside.fullmatch(ours) or inside.fullmatch(name)
            }
            if not fitting:
                parts = {part for name in (*theirs, *theirs.values()) for part in name.split(".")}
                raise ConfigError(
                    "tune.freeze has a pattern that fits no parameter",
                    got=pattern,
                    fix=nearest(pattern, sorted(part for part in parts if not part.isdigit())),
                )
            found |= fitting
        if len(found) == len(theirs):
            raise ConfigError("tune.freeze leaves nothing to learn", got=list(self.freeze))
        return frozenset(found)

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
        layers: tuple[str, ...] = (*LINEAR_LAYERS, OUTPUT_MATRIX)
        if not self.pattern:
            layers = layers_named(self.layers, key="tune.layers")
        return AdapterConfig(
            method=self.method,
            rank=self.rank,
            alpha=self.alpha,
            layers=tuple(name for name in layers if name != OUTPUT_MATRIX),
            unembed=OUTPUT_MATRIX in layers,
            base=self.base,
            dropout=self.dropout,
            blocks=tuple(sorted(set(self.layers_to_transform))),
            pattern=self.pattern,
            excluded=self.exclude_modules,
            ranks=tuple(self.rank_pattern.items()),
            alphas=tuple(self.alpha_pattern.items()),
        )

    def adapter_of(self, model: DecoderConfig) -> AdapterConfig | None:
        """Return the adapter with the kinds of layers that it has in a model.

        Raises:
            ConfigError: modules_to_save names what cannot be trained whole.
        """
        if self.adapter is None:
            return None
        adapter = self.adapter.within(model.linear_layers)
        return replace(adapter, saved=self._saved(model, adapter)) if self.modules_to_save else adapter

    def _saved(self, model: DecoderConfig, adapter: AdapterConfig) -> tuple[str, ...]:
        """Return the names of the modules of modules_to_save."""
        modules, mixed = {}, set()
        for ours, stored in model.stored_rows.items():
            modules[name := ours.rpartition(".")[0]] = stored.tensor.rpartition(".")[0]
            mixed |= set() if stored.is_whole else {name}
        found: dict[str, None] = {}
        for wanted in self.modules_to_save:
            fitting = [
                ours
                for ours, theirs in modules.items()
                if any(f".{wanted}." in f".{name}." for name in (ours, theirs))
            ]
            if not fitting:
                if model.tie_word_embeddings and wanted in ("lm_head", OUTPUT_MATRIX):
                    fix = "Write 'embed_tokens': this model's output matrix is the embedding."
                else:
                    parts = {name.rpartition(".")[2] for name in (*modules, *modules.values())}
                    fix = nearest(wanted, sorted(parts))
                raise ConfigError(
                    "tune.modules_to_save names a module that the model does not have", got=wanted, fix=fix
                )
            for name in fitting:
                if name in mixed:
                    raise ConfigError(
                        f"tune.modules_to_save names {name!r}, which {model.model_type} models store in one "
                        "matrix with others, or in another order",
                        got=wanted,
                        fix="Leave it out, or give it an adapter.",
                    )
                if (
                    name.rpartition(".")[2] in (*LINEAR_LAYERS, OUTPUT_MATRIX)
                    and adapter.of(name) is not None
                ):
                    rounded = f" and is rounded to {self.base}" if self.base != "compute" else ""
                    raise ConfigError(
                        f"tune.modules_to_save names {name!r}, which has an adapter{rounded}",
                        got=wanted,
                        fix="Add it to tune.exclude_modules, or leave it out here.",
                    )
            found |= dict.fromkeys(fitting)
        return tuple(name for name in modules if name in found)

    def check_slices(self, model: DecoderConfig, *, ranks: int) -> None:
        """Refuse tensor parallelism that would cut a group of inputs that share a scale of 4-bit weights.

        Raises:
            ConfigError: the rounding would depend on the number of ranks.
        """
        adapter = self.adapter_of(model)
        if adapter is None or adapter.base != "int4":
            return
        for path, (_, inputs) in model.linear_layers.items():
            name = path.rpartition(".")[2]
            is_cut = name in ("output", "down") and adapter.of(path) is not None  # between its inputs
            if is_cut and ranks > 1 and inputs // ranks % GROUP:
                raise ConfigError(
                    f"tune.base 'int4' has one scale for {GROUP} inputs of an output, and parallel.tensor "
                    f"cuts the {inputs} inputs of layer {name!r} into {inputs // ranks} a rank",
                    got=ranks,
                    fix="Set tune.base to 'int8', which may be cut anywhere, or parallel.tensor to 1.",
                )

    def _check_fused(self, model: DecoderConfig, adapter: AdapterConfig) -> None:
        """Refuse an adapter that could not be written where several layers are stored in one matrix."""
        layers = model.linear_layers
        for parts, block in product(model.family.tensors.fused.values(), range(model.num_hidden_layers)):
            kinds = [part.rpartition(".")[2] for part in parts]
            names = [name for part in parts if (name := f"layers.{block}.{part}") in layers]
            owned = [own for name in names if (own := adapter.of(name)) is not None]
            if adapter.has_magnitudes and owned and len(owned) < len(parts):
                raise ConfigError(
                    f"{model.model_type} models store {' and '.join(kinds)} in one matrix, and dora adapts "
                    "all of its rows",
                    got=self.layers,
                    fix=f"Name {' and '.join(kinds)} in tune.layers, or none of them.",
                )
            if (rank := sum(own.rank for own in owned)) > MAX_RANK:
                raise ConfigError(
                    f"tune.rank is too large: {model.model_type} models store {' and '.join(kinds)} in one "
                    f"matrix, whose adapter has the sum of their ranks, {rank}",
                    got=self.rank,
                    fix=f"Use at most {MAX_RANK // len(owned)}; 8 to 64 are usual.",
                )

    def check_fit(self, model: DecoderConfig) -> None:
        """Refuse a rank that saves nothing over the matrices that it adapts, and a matrix that is not there.

        Raises:
            ConfigError: with the largest rank that is possible, or the layers that are there.
        """
        adapter = self.adapter_of(model)
        if adapter is None:
            return
        self._check_layers(model)
        self._check_blocks(model)
        if (rank := max([self.rank, *self.rank_pattern.values()])) > MAX_RANK:
            raise ConfigError(
                "tune.rank is larger than any that is read again, to serve it or to merge it",
                got=rank,
                fix=f"Use at most {MAX_RANK}; 8 to 64 are usual.",
            )
        if adapter.unembed and model.tie_word_embeddings:
            raise ConfigError(
                f"tune.layers names {OUTPUT_MATRIX!r}, and this model has no output matrix of its own: it is "
                "the embedding",
                got=self.layers,
                fix='Leave it out: "all" are the linear layers of the blocks.',
            )
        if adapter.unembed and adapter.dropout:
            raise ConfigError(
                f"tune.dropout does not work with an adapter of the output matrix, {OUTPUT_MATRIX!r}",
                got=self.dropout,
                fix="Leave one of them out.",
            )
        if not adapter.layers:
            named = f"names {OUTPUT_MATRIX!r} alone" if adapter.unembed else "names no layer of the model"
            raise ConfigError(
                f"tune.layers {named}, and blocks that learn nothing are not supported",
                got=self.layers,
                fix=f'Name layers of the blocks too, or all of them: ["all", "{OUTPUT_MATRIX}"].',
            )
        self._check_fused(model, adapter)
        shapes = {**model.linear_layers, OUTPUT_MATRIX: (model.vocab_size, model.hidden_size)}
        for name, shape in sorted(shapes.items(), key=lambda layer: min(layer[1])):
            own, most = adapter.of(name), min(shape)
            if own is not None and own.rank > most:
                raise ConfigError(
                    f"tune.rank is larger than the layer {name.rpartition('.')[2]!r}, which is "
                    f"{' x '.join(map(str, shape))}",
                    got=own.rank,
                    fix=f"Use at most {most}; 8 to 64 are usual.",
                )

    def _check_layers(self, model: DecoderConfig) -> None:
        """Refuse a layer that is named by itself and that the blocks do not have."""
        for name in (self.layers,) if isinstance(self.layers, str) else self.layers:
            if name == self.pattern:
                continue
            layer, *others = layers_named(name, key="tune.layers")
            present = dict.fromkeys(path.rpartition(".")[2] for path in model.linear_layers)
            if not others and layer != OUTPUT_MATRIX and layer not in present:
                raise ConfigError(
                    f"tune.layers names a layer that {model.model_type} models do not have",
                    got=name,
                    fix=f"Leave it out: their layers are {', '.join(present)}.",
                )

    def _check_blocks(self, model: DecoderConfig) -> None:
        """Refuse blocks that the model does not have, and patterns of layers that none has."""
        for number in self.layers_to_transform:
            if not 0 <= number < model.num_hidden_layers:
                raise ConfigError(
                    "tune.layers_to_transform names a block that the model does not have",
                    got=number,
                    fix=f"Its blocks are 0 to {model.num_hidden_layers - 1}.",
                )
        assert self.adapter is not None
        bare = replace(self.adapter, excluded=(), pattern="", blocks=())
        names = (*model.linear_layers, OUTPUT_MATRIX)
        adapted = [name for name in names if bare.of(name) is not None]
        for key, table, fits in (
            ("exclude_modules", self.exclude_modules, is_excluded),
            ("rank_pattern", self.rank_pattern, is_named),
            ("alpha_pattern", self.alpha_pattern, is_named),
        ):
            for text in table:
                if not any(fits(text, name) for name in adapted):
                    raise ConfigError(
                        f"tune.{key} has a pattern that fits no layer",
                        got=text,
                        fix="Names are such as 'q_proj', 'mlp.up_proj' and 'layers.0.self_attn.q_proj'.",
                    )


def _check_expressions(texts: Iterable[str], *, key: str) -> None:
    for text in texts:
        try:
            re.compile(text)
        except re.error as error:
            raise ConfigError(
                f"{key} is not a regular expression: {error}",
                got=text,
                fix="Correct it; a dot is any character.",
            ) from None
