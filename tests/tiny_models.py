"""Tiny models of every family as transformers writes them, for tests that open folders; one of them talks."""

import base64
import json
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    GraniteSWAConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    VaultGemmaConfig,
)

from penstock.text.tokenizer import Tokenizer, train_tokenizer

SHAPE = {
    "vocab_size": 211,  # odd: ranks have different parts of it
    "hidden_size": 32,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 32.0,
    "original_max_position_embeddings": 4,  # so that factors on queries differ in a short text
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
HUNYUAN = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 100.0, "factor": 1.0}


def longrope(frequencies: int) -> dict[str, Any]:  # Any: JSON
    """Return a rule that slows each frequency by a factor of its own."""
    steps = range(frequencies)
    return {
        "type": "longrope",
        "short_factor": [1 + 0.1 * step for step in steps],
        "long_factor": [1.5 + 0.5 * step for step in steps],
    }


def of_every_family(**shape: Any) -> dict[str, PreTrainedConfig]:  # Any: of whatever type the field is
    """Return name -> configuration, all of this shape."""
    granite = {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 4.0}
    windows = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    layers = shape["num_hidden_layers"]
    kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    linear = {"rope_type": "linear", "factor": 8.0}
    olmo3, gemma3 = (
        {
            "full_attention": {"rope_theta": 20_000.0, **rule},
            "sliding_attention": {"rope_theta": base, "rope_type": "default"},
        }
        for rule, base in ((yarn, 20_000.0), (linear, 10_000.0))
    )
    gemma2 = {
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 0.7,
        "final_logit_softcapping": 4.0,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",  # others of transformers have no softcap
    }
    in_turn = {"sliding_window": 7, "layer_types": kinds}
    dense = {
        "num_local_experts": 0,
        "shared_intermediate_size": shape["intermediate_size"],
        "mamba_n_heads": 1,
    }
    return {
        "llama": LlamaConfig(**shape, attention_bias=True, mlp_bias=True),
        "llama-tied": LlamaConfig(**shape, tie_word_embeddings=True),
        "granite": GraniteConfig(**shape, **granite),
        "mistral": MistralConfig(**shape, sliding_window=7),
        "qwen2": Qwen2Config(**shape, **windows),
        "qwen3": Qwen3Config(**shape, head_dim=16),
        "ministral": MinistralConfig(**shape, **in_turn, head_dim=16),
        "ministral3": Ministral3Config(**shape, head_dim=16, rope_parameters=MINISTRAL3),
        "hunyuan": HunYuanDenseV1Config(**shape, head_dim=16, rope_parameters=HUNYUAN),
        "cwm": CwmConfig(**{**shape, "bos_token_id": 0}, head_dim=8, sliding_window=7),
        "phi3": Phi3Config(**shape, sliding_window=7, partial_rotary_factor=0.5),
        "phi4-mini": Phi3Config(
            **shape,
            partial_rotary_factor=0.5,
            tie_word_embeddings=True,
            original_max_position_embeddings=2,  # every text is longer: transformers never changes divisors
            rope_scaling=longrope(shape["hidden_size"] // shape["num_attention_heads"] // 4),
        ),
        "granite4": GraniteMoeHybridConfig(**shape, **granite, **dense, layer_types=["attention"] * layers),
        "granite-swa": GraniteSWAConfig(
            **shape,
            **granite,
            **in_turn,
            attention_multiplier=0.3,
            tie_word_embeddings=False,
            layer_rope_theta=[20_000.0 * (layer % 2) for layer in range(layers)],
        ),
        "helium": HeliumConfig(**shape, head_dim=shape["hidden_size"] // shape["num_attention_heads"]),
        "ernie": Ernie4_5Config(**shape, head_dim=16, use_bias=True),
        "glm": GlmConfig(**shape, head_dim=16),
        "smollm3": SmolLM3Config(
            **shape, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=7
        ),
        "seed-oss": SeedOssConfig(**shape, head_dim=16, attention_out_bias=True),
        "olmo2": Olmo2Config(**shape),
        "glm4": Glm4Config(**shape, head_dim=16),
        "gemma": GemmaConfig(**shape, head_dim=16, tie_word_embeddings=False),  # tied, it repeats a token
        "gemma2": Gemma2Config(**shape, **in_turn, **gemma2),
        "vaultgemma": VaultGemmaConfig(**shape, **in_turn, **gemma2),
        "arcee": ArceeConfig(**shape, head_dim=8, mlp_bias=True),
        "gemma3": Gemma3TextConfig(
            **shape,
            **in_turn,
            head_dim=16,
            query_pre_attn_scalar=24,
            rope_parameters=gemma3,
            tie_word_embeddings=False,
        ),
        "olmo3": Olmo3Config(**shape, **in_turn, rope_parameters=olmo3),
        "exaone4": Exaone4Config(**shape, **in_turn),
    }


CONFIGS = {
    **of_every_family(**SHAPE),
    "qwen2-one-head": Qwen2Config(
        **{**SHAPE, "num_key_value_heads": 1}, use_sliding_window=True, sliding_window=9, max_window_layers=0
    ),
}

TEXT = (
    'the penstock feeds the turbine; the größer one, 日本, don\'t, 12 + 3. {"name": "add", "arguments": {}}'
)
"""What the tokenizer of the model that talks was trained on."""


def save_talker(folder: Path, *, context: int = 4096, vocab_size: int = 400) -> Path:
    """Write a Llama of random weights whose answers wander, and do not end if greedy, with a tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    model, tokenizer = (
        AutoModelForCausalLM.from_config(config),
        train_tokenizer([TEXT] * 9, vocab_size=vocab_size),
    )
    torch.nn.init.zeros_(model.lm_head.weight[tokenizer.eos_id])
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def save_tiny_model(family: str, folder: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write a random float32 model of a family; return it in evaluation mode."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")) or "norm" in name:  # they start equal, and would show no mistake
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return model


def save_reciter(folder: Path, script: Sequence[str], *, after: str, special: Collection[str] = ()) -> Path:
    """Write a Llama that recites a script when its prompt ends in a given text, and else draws evenly.

    Each part of the script, all different, is one added token of its tokenizer: a model whose next token
    follows from the last one alone.

    Args:
        after: a text, one token too.
        special: which parts are declared to be special tokens.
    """
    parsed = tokenizers.Tokenizer.from_str(train_tokenizer([TEXT] * 9, vocab_size=300).content.decode())
    for part in (after, *script):
        parsed.add_tokens([tokenizers.AddedToken(part, special=part in special, normalized=False)])
    tokenizer = Tokenizer(parsed.to_str().encode())
    size = -(-tokenizer.vocab_size // 64) * 64
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=size // 64,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    for weights in (
        model.model.layers[0].self_attn.o_proj,
        model.model.layers[0].mlp.down_proj,
        model.lm_head,
    ):
        torch.nn.init.zeros_(weights.weight)
    torch.nn.init.eye_(model.model.embed_tokens.weight)
    tokens = [*(tokenizer.added[part] for part in (after, *script)), tokenizer.eos_id]
    for token, following in pairwise(tokens):
        model.lm_head.weight.data[following, token] = 10.0
    model.save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    return folder


def panicking(tokenizer: bytes) -> bytes:
    """Return a tokenizer.json whose library panics on what is not ASCII: its table of letters ends there."""
    content = json.loads(tokenizer)
    table = (512).to_bytes(4, "little") + bytes(512)
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return json.dumps(content).encode()
