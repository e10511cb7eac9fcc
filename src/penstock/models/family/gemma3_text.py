"""Gemma 3 (arXiv:2503.19786), text: Gemma with norms after layers, of queries and keys, and windows.

Sizes from 4B also read images; their folders have this model under `text_config`.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.models.family.base import Raw
from penstock.models.family.gemma import FAMILY as GEMMA
from penstock.models.family.gemma import GELU
from penstock.models.family.query_scalar import check_scalar, read_scalar, write_scalar
from penstock.models.family.rope_by_kind import check_rules, read_rules, rule_of_kind, write_rules
from penstock.models.family.tensors import TensorLayout
from penstock.models.family.windows import FULL, SLIDING, checked_kinds, read_layer_types, write_layer_types

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

_BASES = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}
_PATTERN = 6


def _read(raw: Raw) -> Raw:
    layers, every = raw["num_hidden_layers"], raw.get("sliding_window_pattern")
    every = _PATTERN if every is None else every
    if not isinstance(every, int) or every < 1:
        raise ConfigError("sliding_window_pattern must be a number of layers, at least 1", got=every)
    usual = [SLIDING if (i + 1) % every else FULL for i in range(layers)]
    kinds = (
        usual
        if raw["layer_types"] is None
        else checked_kinds(raw["layer_types"], layers, window=raw["sliding_window"])
    )
    return {
        **read_layer_types({**raw, "layer_types": kinds}, default=(FULL,)),
        **read_rules(raw, kinds, bases=_BASES),
        **read_scalar(raw),
    }


def _check(config: "DecoderConfig") -> None:
    check_rules(config)
    check_scalar(config)


def _write(config: "DecoderConfig") -> Raw:
    rules = write_rules(config)
    local = rules["rope_parameters"][SLIDING]["rope_theta"]
    return {
        **write_layer_types(config),
        **rules,
        "rope_local_base_freq": local,
        **write_scalar(config),
        "sliding_window": config.sliding_window,
    }


FAMILY = replace(
    GEMMA,
    architecture="Gemma3ForCausalLM",
    own_keys=frozenset({
        "attention_bias", "hidden_activation", "sliding_window", "sliding_window_pattern", "layer_types",
        "query_pre_attn_scalar", "rope_local_base_freq",
    }),
    settings=frozenset({"attention_multiplier", "layer_rope_theta", "scaled_layers"}),
    defaults={
        **{key: value for key, value in GEMMA.defaults.items() if key != "hidden_act"},
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    sizes={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
    },
    ignored=GEMMA.ignored | {"_sliding_window_pattern"},
    activation_key="hidden_activation",
    activation_names=(GELU,),
    full_rope=lambda raw: rule_of_kind(raw, FULL, bases=_BASES),
    read=_read,
    write=_write,
    check=_check,
    qk_norm="head",
    norm_placement="sandwich",
    tensors=TensorLayout(
        names={
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
        }
    ),
)  # fmt: skip
