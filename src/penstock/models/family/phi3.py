"""Phi-3, 3.5, 4 and 4-mini (arXiv:2404.14219, arXiv:2412.08905): fused matrices, one window."""

from penstock.models.family.base import BOOKKEEPING, DEFAULTS, Family
from penstock.models.family.tensors import TensorLayout

FAMILY = Family(
    architecture="Phi3ForCausalLM",
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
    ignored=BOOKKEEPING | {"resid_pdrop", "embd_pdrop"},
    tensors=TensorLayout(
        fused={
            "self_attn.qkv_proj": ("attention.query", "attention.key", "attention.value"),
            "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        }
    ),
)
