"""Random Llamas for the serving benchmark: one Hugging Face folder, and the same weights for llama.cpp.

    python serve_models.py FOLDER OUT.gguf bf16|f32|q8_0

Written once; the second needs `gguf` and `torch`, and so runs under a peer's interpreter.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from serve_load import SHAPES


def prompt_flop(model, tokens):
    """Return the multiplications and additions of a prompt, with the logits of its last token."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = map(int, SHAPES[model].split("/"))
    of_block = hidden * (2 * hidden + 2 * hidden // heads * kv_heads) + 3 * hidden * intermediate
    attention = hidden * tokens  # half of what lies before each token, times keys and times values
    return 2 * (tokens * layers * (of_block + attention) + hidden * vocabulary)


def write_folder(folder, model, dtype):
    """Write config.json and model.safetensors, unless they are there; return the bytes a token reads."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary = map(int, SHAPES[model].split("/"))
    size = hidden // heads
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    if not (tied := model == "1b"):
        shapes["lm_head.weight"] = (vocabulary, hidden)
    for layer in range(layers):
        for name, shape in {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv_heads * size, hidden),
            "self_attn.v_proj": (kv_heads * size, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (intermediate, hidden), "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    read = sum(torch.Size(shape).numel() for name, shape in shapes.items())
    read -= 0 if tied else hidden * vocabulary  # of the embedding a token reads one row
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = torch.Generator().manual_seed(0)
        tensors = {name: _random(shape, generator, dtype) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": dtype,
            "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size,
            "vocab_size": vocabulary, "tie_word_embeddings": tied, "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        write_tokenizer(folder, vocabulary)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    return read * torch.empty(0, dtype=getattr(torch, dtype)).element_size()


def write_tokenizer(folder, vocabulary):
    """Write a tokenizer of made-up words: what servers turn tokens into while they stream."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = ["<unk>", "<s>", "</s>", *(f"\u0120w{i}" for i in range(3, vocabulary))]  # a space and a word
    made = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel()
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(names[:3])
    made.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


def _random(shape, generator, dtype):
    if len(shape) == 1:
        return torch.ones(shape, dtype=getattr(torch, dtype))
    return (0.02 * torch.randn(shape, generator=generator)).to(getattr(torch, dtype))


_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def write_gguf(folder, path, kind):
    """Write a folder's weights as llama.cpp reads them."""
    import gguf

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    types = gguf.GGMLQuantizationType
    matrix_type = {"bf16": types.BF16, "f32": types.F32, "q8_0": types.Q8_0}[kind]
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = _for_gguf(name, tensor.float(), config).numpy()
        of_type = types.F32 if values.ndim == 1 else matrix_type
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, of_type), raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name):
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _for_gguf(name, tensor, config):
    # llama.cpp rotates neighbouring pairs of a head, Hugging Face its halves
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.view(config[heads], 2, -1, tensor.shape[-1]).transpose(1, 2).reshape(tensor.shape)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
