"""Gemma 2 (arXiv:2408.00118): Gemma with norms after layers too, windows in turn, and two softcaps."""

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.models.family.base import Raw
from penstock.models.family.gemma import FAMILY as GEMMA
from penstock.models.family.gemma import GELU
from penstock.models.family.query_scalar import check_scalar, read_scalar, write_scalar
from penstock.models.family.tensors import TensorLayout
from penstock.models.family.windows import FULL, SLIDING, read_layer_types, write_layer_types

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def _read(raw: Raw) -> Raw:
    return {**read_layer_types(raw, default=(SLIDING, FULL)), **read_scalar(raw)}


def _write(config: "DecoderConfig") -> Raw:
    return {**write_layer_types(config), **write_scalar(config)}


FAMILY = replace(
    GEMMA,
    architecture="Gemma2ForCausalLM",
    own_keys=frozenset({
        "attention_bias", "hidden_activation", "sliding_window", "layer_types", "query_pre_attn_scalar",
        "attn_logit_softcapping", "final_logit_softcapping",
    }),
    settings=frozenset({"attention_multiplier"}),
    defaults={
        **{key: value for key, value in GEMMA.defaults.items() if key != "hidden_act"},
        "num_key_value_heads": 4,
        "hidden_activation": GELU,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    ignored=GEMMA.ignored | {"sliding_window_size"},
    activation_key="hidden_activation",
    activation_names=(GELU,),
    read=_read,
    write=_write,
    check=check_scalar,
    norm_placement="sandwich",
    tensors=TensorLayout(
        names={
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_feedforward_layernorm",
        }
    ),
)  # fmt: skip
