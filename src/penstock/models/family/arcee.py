"""Arcee AFM 4.5B (2025): Llama whose feed-forward has no gate, and squares ReLU."""

from penstock.models.family.base import DEFAULTS, Family

FAMILY = Family(
    architecture="ArceeForCausalLM",
    own_keys=frozenset({"attention_bias", "mlp_bias"}),
    defaults={
        **DEFAULTS,
        "head_dim": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "relu2",
    },
    biases="chosen",
    activation="relu2",
    activation_names=("relu2",),
    has_gate=False,
)
