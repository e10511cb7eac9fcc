"""Code World Model (arXiv:2510.02387): Llama 3 with a window in three layers of four."""

from functools import partial
from typing import TYPE_CHECKING

from penstock.models.family.base import DEFAULTS, Family, Raw
from penstock.models.family.windows import FULL, SLIDING, read_layer_types, write_layer_types

if TYPE_CHECKING:
    from penstock.models.decoder.config import DecoderConfig

_DEFAULT_WINDOW = 8192


def _write(config: "DecoderConfig") -> Raw:
    # transformers opens no CWM without numbers here; a window of no layer, and a token that no prompt gets
    return {
        **write_layer_types(config),
        "sliding_window": config.sliding_window or _DEFAULT_WINDOW,
        "bos_token_id": 0,
    }


FAMILY = Family(
    architecture="CwmForCausalLM",
    own_keys=frozenset({"sliding_window", "layer_types", "mlp_bias"}),
    defaults={
        **DEFAULTS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "sliding_window": _DEFAULT_WINDOW,
        "layer_types": None,
        "mlp_bias": False,
    },
    default_rope={
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
    },
    read=partial(read_layer_types, default=(FULL, SLIDING, SLIDING, SLIDING)),
    write=_write,
)
