"""HunYuan dense, 0.5B to 7B (Tencent, 2025): queries and keys are normalised after the rotation."""

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.models.family.base import BOOKKEEPING, DEFAULTS, Family, Raw
from penstock.models.family.tensors import TensorLayout

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


_OF_OTHER_PARTS = frozenset({
    "cla_share_factor", "class_num", "dense_list", "pool_type",
    "org_vocab_size", "eod_token_id", "pad_id", "mask_init_id",
    "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id",
})  # fmt: skip
"""Keys of special tokens, and of parts that the network does not have: layers that share keys and values, a
classifier."""


def _read(raw: Raw) -> Raw:
    width, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    given = raw.get("attention_head_dim")
    size = raw["head_dim"] or (width // heads if width and heads else given)
    if given not in (None, size):
        raise ConfigError(
            f"attention_head_dim must be the size of a head, {size}",
            got=given,
            fix="Take config.json from where the weights came from.",
        )
    return {}


def _write(config: "DecoderConfig") -> Raw:
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "ntk_alpha":
        return {}
    rule = {"rope_type": "dynamic", "alpha": scaling.alpha, "factor": scaling.factor}
    return {"rope_scaling": rule, "rope_parameters": {"rope_theta": config.rope_theta, **rule}}


FAMILY = Family(
    architecture="HunYuanDenseV1ForCausalLM",
    own_keys=frozenset({"attention_bias", "attention_head_dim"}),
    defaults={**DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False, "head_dim": None},
    read=_read,
    rope_names={"dynamic": "ntk_alpha"},
    write=_write,
    ignored=BOOKKEEPING | _OF_OTHER_PARTS,
    biases="chosen",
    qk_norm="rotated",
    tensors=TensorLayout(
        names={
            "attention.query_norm": "self_attn.query_layernorm",
            "attention.key_norm": "self_attn.key_layernorm",
        }
    ),
)
