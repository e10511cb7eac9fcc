"""Granite 4.0 without experts and Mamba: Granite 3 with a fused feed-forward, with or without positions."""

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError, ModelError
from penstock.models.family.base import BOOKKEEPING, DEFAULTS, Family, Raw
from penstock.models.family.granite import FACTORS
from penstock.models.family.tensors import TensorLayout

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

_ATTENTION = ("attention", "full_attention")
_UNUSED = frozenset({
    "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
    "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit", "num_experts_per_tok",
    "output_router_logits", "router_aux_loss_coef", "init_method",
})  # fmt: skip
"""Keys of Mamba layers and experts, which a dense model has none of."""


def _read(raw: Raw) -> Raw:
    kinds = _kinds(raw)
    if raw["num_local_experts"] or not set(map(str, kinds)) <= set(_ATTENTION):
        raise ModelError(
            "Granite 4.0 with Mamba layers or experts is not supported",
            got=f"{raw['num_local_experts']} experts, {', '.join(sorted(set(map(str, kinds))))}",
            fix="Take a dense size: granite-4.0-micro, granite-4.0-1b or granite-4.0-350m.",
        )
    positions = raw["position_embedding_type"]
    if positions not in ("rope", "nope", None):
        raise ConfigError('position_embedding_type must be "rope", "nope" or absent', got=positions)
    return {
        "intermediate_size": raw["shared_intermediate_size"],
        "partial_rotary_factor": 1.0 if positions == "rope" else 0.0,
        "layer_types": None,
    }


def _kinds(raw: Raw) -> list[object]:
    """Return the kinds of the layers; transformers knows them by two names, and reads the second first."""
    layers, found = raw["num_hidden_layers"], (raw["layer_types"], raw.get("layers_block_type"))
    given = [["linear_attention"] * layers] if found == (None, None) else [x for x in found if x is not None]
    for kinds in given:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigError(f"layer_types must name the kind of each of the {layers} layers", got=kinds)
    return [kind for kinds in given for kind in kinds]


def _check(config: "DecoderConfig") -> None:
    if config.partial_rotary_factor not in (0.0, 1.0):
        raise ConfigError(
            "partial_rotary_factor must be 1 in granitemoehybrid models, or 0 for no positions",
            got=config.partial_rotary_factor,
        )


def _write(config: "DecoderConfig") -> Raw:
    return {
        "shared_intermediate_size": config.intermediate_size,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 1,  # transformers checks that it divides the width, though no layer is Mamba
        "layer_types": ["attention"] * config.num_hidden_layers,
        "position_embedding_type": "rope" if config.partial_rotary_factor else None,
    }


FAMILY = Family(
    architecture="GraniteMoeHybridForCausalLM",
    limits="sizes with experts or Mamba layers",
    own_keys=FACTORS
    | {
        "attention_bias", "shared_intermediate_size", "num_local_experts", "layer_types", "layers_block_type",
        "position_embedding_type",
    },
    settings=frozenset({"partial_rotary_factor"}),
    defaults={
        **DEFAULTS,
        **dict.fromkeys(FACTORS, 1.0),
        "attention_bias": False,
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
    },
    ignored=BOOKKEEPING | _UNUSED,
    read=_read,
    write=_write,
    check=_check,
    biases="chosen",
    tensors=TensorLayout(
        names={"mlp.down": "shared_mlp.output_linear"},
        fused={"shared_mlp.input_linear": ("mlp.gate", "mlp.up")},
    ),
)  # fmt: skip
