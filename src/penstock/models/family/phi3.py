"""Phi-3, 3.5, 4 and 4-mini (arXiv:2404.14219, arXiv:2412.08905): fused matrices, one window, `longrope`."""

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.models.family.base import BOOKKEEPING, DEFAULTS, Family, Raw
from penstock.models.family.tensors import TensorLayout

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def _check(config: "DecoderConfig") -> None:
    if config.rope_scaling is not None and config.rope_scaling.rope_type != "longrope":
        raise ConfigError(
            "rope_scaling must be longrope in phi3 models, or absent", got=config.rope_scaling.rope_type
        )


def _write(config: "DecoderConfig") -> Raw:
    scaling = config.rope_scaling
    if scaling is None:
        return {}
    original, short, long = (
        scaling.original_max_position_embeddings,
        scaling.short_factor,
        scaling.long_factor,
    )
    assert original is not None and short is not None and long is not None, scaling  # noqa: PT018
    rule: dict[str, object] = {"type": "longrope", "short_factor": list(short), "long_factor": list(long)}
    if scaling.factor != config.max_position_embeddings / original:  # transformers 4 allows three keys only
        rule["factor"] = scaling.factor
    if scaling.attention_factor is not None:
        rule["attention_factor"] = scaling.attention_factor
    return {"rope_scaling": rule, "original_max_position_embeddings": original}


FAMILY = Family(
    architecture="Phi3ForCausalLM",
    own_code="modeling_phi3",  # a class of transformers since 4.40
    own_keys=frozenset({"sliding_window"}),
    settings=frozenset({"partial_rotary_factor"}),
    rotates_part=True,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    rope_names={"su": "longrope", "yarn": "longrope"},  # of folders before transformers 4.43
    write=_write,
    check=_check,
    ignored=BOOKKEEPING | {"resid_pdrop", "embd_pdrop"},
    tensors=TensorLayout(
        fused={
            "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
            "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        }
    ),
)
