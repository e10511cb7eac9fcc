"""Ministral 3, 3B to 14B (Mistral, 2025): Mistral whose queries grow with their position."""

from typing import TYPE_CHECKING

from penstock.core.errors import ConfigError
from penstock.models.family.base import Family
from penstock.models.family.mistral import FAMILY as MISTRAL

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig


def _check(config: "DecoderConfig") -> None:
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn" or scaling.llama_4_scaling_beta is None:
        raise ConfigError(
            "rope_scaling of ministral3 models must be yarn with llama_4_scaling_beta",
            got=scaling,
            fix='Set both, or set model_type = "mistral".',
        )


FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    own_keys=MISTRAL.own_keys,
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    sizes={**MISTRAL.sizes, "vocab_size": 131_072, "num_hidden_layers": 34},
    default_rope={
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16_384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    check=_check,
    scales_queries=True,
)
