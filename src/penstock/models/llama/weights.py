"""The names of weights: Penstock's and Hugging Face's, one table, both ways."""

from penstock.models.llama.config import LlamaConfig

_MODEL = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "unembed.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def hugging_face_names(config: LlamaConfig) -> dict[str, str]:
    """Return Penstock's name -> Hugging Face's name for every tensor of the model, in model order."""
    names = {"embed.weight": _MODEL["embed.weight"]}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in _BLOCK.items():
            biased = (config.attention_bias and ours.startswith("attention.")) or (
                config.mlp_bias and ours.startswith("mlp.")
            )
            for kind in ("weight", "bias") if biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = _MODEL["norm.weight"]
    if not config.tie_word_embeddings:
        names["unembed.weight"] = _MODEL["unembed.weight"]
    return names
