"""HunYuan dense, 0.5B to 7B (Tencent, 2025): queries and keys are normalised after the rotation."""

from typing import TYPE_CHECKING

from penstock.models.family.base import BOOKKEEPING, DEFAULTS, Family, Raw
from penstock.models.family.tensors import TensorLayout

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def _write(config: "DecoderConfig") -> Raw:
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "ntk_alpha":
        return {}
    rule = {"rope_type": "dynamic", "alpha": scaling.alpha, "factor": scaling.factor}
    return {"rope_scaling": rule, "rope_parameters": {"rope_theta": config.rope_theta, **rule}}


FAMILY = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    own_keys=frozenset({"attention_bias"}),
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False, "head_dim": None},
    rope_names={"dynamic": "ntk_alpha"},
    write=_write,
    ignored=BOOKKEEPING | {"eod_token_id"},
    biases="chosen",
    qk_norm="rotated",
    tensors=TensorLayout(
        names={
            "attention.query_norm": "self_attn.query_layernorm",
            "attention.key_norm": "self_attn.key_layernorm",
        }
    ),
)
