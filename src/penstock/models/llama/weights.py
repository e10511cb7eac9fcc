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
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def hugging_face_names(config: LlamaConfig) -> dict[str, str]:
    """Return Penstock's name -> Hugging Face's name for every tensor of the model, in model order."""
    names = {"embed.weight": _MODEL["embed.weight"]}
    biased = {f"attention.{name}" for name in config.attention_biases}
    if config.mlp_bias:
        biased |= {"mlp.gate", "mlp.up", "mlp.down"}
    absent = set() if config.family.has_query_key_norm else {"attention.query_norm", "attention.key_norm"}
    block = {ours: theirs for ours, theirs in _BLOCK.items() if ours not in absent}
    for layer in range(config.num_hidden_layers):
        for ours, theirs in block.items():
            for kind in ("weight", "bias") if ours in biased else ("weight",):
                names[f"layers.{layer}.{ours}.{kind}"] = f"model.layers.{layer}.{theirs}.{kind}"
    names["norm.weight"] = _MODEL["norm.weight"]
    if not config.tie_word_embeddings:
        names["unembed.weight"] = _MODEL["unembed.weight"]
    return names
