"""ERNIE 4.5 without experts (Baidu, 2025): Llama with interleaved rotary embedding, biases all or none."""

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.models.family.base import DEFAULTS, Family, Raw
from penstock.models.family.tensors import TensorLayout

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def _check(config: "DecoderConfig") -> None:
    if config.attention_bias != config.mlp_bias:
        raise ConfigError(
            "attention_bias and mlp_bias must be equal in ernie4_5 models",
            got=f"{config.attention_bias} and {config.mlp_bias}",
        )


def _read(raw: Raw) -> Raw:
    return {"attention_bias": raw["use_bias"], "mlp_bias": raw["use_bias"]}


def _write(config: "DecoderConfig") -> Raw:
    return {"use_bias": config.attention_bias}


FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    own_code="modeling_ernie4_5",  # a class of transformers since 4.54
    limits="sizes with experts",
    own_keys=frozenset({"use_bias"}),
    settings=frozenset({"attention_bias", "mlp_bias"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "use_bias": False,
    },
    default_rope={"rope_theta": 500_000.0},
    read=_read,
    write=_write,
    check=_check,
    biases="chosen",
    tensors=TensorLayout(has_interleaved_rope=True),
)
