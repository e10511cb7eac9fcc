"""Published `config.json` files open, and describe the same network as the preset of their name.

`published_configs.json` has whole files, each with the folder that it is from. What describes images is cut,
and so are refused files. The end of `ankitdhiman/nero` follows its preset, because the copy that was read is
cut. The files in this module lack the keys of special tokens, dtypes and versions.
"""

import json
from pathlib import Path

import pytest

from penstock.core.config import build
from penstock.core.errors import ModelError
from penstock.models.decoder.config import DecoderConfig
from penstock.models.family.config_json import config_json, config_of
from penstock.models.presets import PRESETS

FULL, SLIDING = "full_attention", "sliding_attention"
LLAMA_3_RULE = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GEMMA_3 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_theta": 1000000,
    "sliding_window_pattern": 6,
}
GLM_4 = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
HUNYUAN = {
    "add_classification_head": False,
    "architectures": ["HunYuanDenseV1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "attention_head_dim": 128,
    "bos_token_id": 1,
    "cla_share_factor": 2,
    "class_num": 0,
    "dense_list": [4096, 0],
    "eod_token_id": 127967,
    "head_dim": 128,
    "hidden_act": "silu",
    "im_end_id": 5,
    "im_newline_id": 11,
    "im_start_id": 4,
    "mask_init_id": 12,
    "mlp_bias": False,
    "model_type": "hunyuan_v1_dense",
    "norm_type": "rms",
    "pad_id": 127961,
    "pool_type": "last",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    "rope_theta": 10000.0,
    "text_end_id": 7,
    "text_start_id": 6,
    "tie_word_embeddings": True,
    "use_cla": False,
    "use_qk_norm": True,
    "use_rotary_pos_emb": True,
}
OLMO_3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}


def sizes(text: str) -> dict[str, int]:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    return dict(zip(names.split(), map(int, text.split("/")), strict=True))


PUBLISHED = {
    "granite4.2-30b": {
        "model_type": "granite",
        **sizes("4096/32768/64/32/8"),
        "vocab_size": 100352,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 50000000, "rope_type": "default"},
        "rope_scaling": None,
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "tie_word_embeddings": False,
    },
    "granite-swash-2b": {
        "model_type": "granite_swa",
        **sizes("2560/8192/24/20/4"),
        "vocab_size": 100352,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "sliding_window": 128,
        "layer_types": [FULL, *[SLIDING, SLIDING, SLIDING, FULL] * 5, SLIDING, SLIDING, SLIDING],
        "embedding_multiplier": 12,
        "residual_multiplier": 0.28,
        "logits_scaling": 10,
        "attention_multiplier": 0.0078125,
        "rope_theta": 10000,
    },
    "gemma-2b": {
        "attention_bias": False,
        "head_dim": 256,
        "hidden_act": "gelu",
        "hidden_activation": None,
        **sizes("2048/16384/18/8/1"),
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 256000,
    },
    "gemma3-270m": {
        **GEMMA_3,
        **sizes("640/2048/18/4/1"),
        "_sliding_window_pattern": 6,
        "layer_types": ([SLIDING] * 5 + [FULL]) * 3,
        "max_position_embeddings": 32768,
        "rope_scaling": None,
        "sliding_window": 512,
        "use_bidirectional_attention": False,
        "vocab_size": 262144,
    },
    "gemma3-1b": {
        **GEMMA_3,
        **sizes("1152/6912/26/4/1"),
        "max_position_embeddings": 32768,
        "rope_scaling": None,
        "sliding_window": 512,
        "vocab_size": 262144,
    },
    "gemma3-12b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "mm_tokens_per_image": 256,
        "text_config": {
            **GEMMA_3,
            **sizes("3840/15360/48/16/8"),
            "max_position_embeddings": 131072,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            "vocab_size": 262208,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "gemma3-27b": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {
            **sizes("5376/21504/62/32/16"),
            "head_dim": 128,
            "model_type": "gemma3_text",
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
    },
    "olmo3-7b": {
        **OLMO_3,
        **sizes("4096/11008/32/32/32"),
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
    },
    "olmo3-32b": {
        **OLMO_3,
        **sizes("5120/27648/64/40/8"),
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16,
    },
    "exaone4.0-1.2b": {
        "architectures": ["Exaone4ForCausalLM"],
        "head_dim": 64,
        **sizes("2048/4096/30/32/8"),
        "layer_types": [FULL] * 30,
        "max_position_embeddings": 65536,
        "model_type": "exaone4",
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA_3_RULE,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "sliding_window_pattern": None,
        "tie_word_embeddings": True,
        "vocab_size": 102400,
    },
    "exaone4.0-32b": {
        "architectures": ["Exaone4ForCausalLM"],
        "head_dim": 128,
        **sizes("5120/27392/64/40/8"),
        "max_position_embeddings": 131072,
        "model_type": "exaone4",
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA_3_RULE,
        "rope_theta": 1000000,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": False,
        "vocab_size": 102400,
        "attn_implementation": "flash_attention_2",
    },
    "glm4-9b-0414": {
        **GLM_4,
        "attention_bias": True,
        **sizes("4096/13696/40/32/2"),
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"},
    },
    "glm4-32b-0414": {**GLM_4, "attention_bias": False, **sizes("6144/23040/61/48/2")},
    "hunyuan-0.5b": {
        **HUNYUAN,
        **sizes("1024/3584/24/16/8"),
        "max_position_embeddings": 262144,
        "org_vocab_size": 120818,
        "vocab_size": 120818,
    },
    "hunyuan-1.8b": {
        **{key: value for key, value in HUNYUAN.items() if key not in ("rope_scaling", "rope_theta")},
        **sizes("2048/6144/32/16/4"),
        "max_position_embeddings": 262144,
        "org_vocab_size": 120818,
        "rope_parameters": {**HUNYUAN["rope_scaling"], "rope_theta": 10000.0, "rope_type": "dynamic"},
        "vocab_size": 120818,
    },
    "hunyuan-7b": {
        **HUNYUAN,
        **sizes("4096/14336/32/32/8"),
        "max_position_embeddings": 32768,
        "org_vocab_size": 128167,
        "vocab_size": 128167,
    },
    "ministral-8b": {
        "architectures": ["MistralForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        **sizes("4096/12288/36/32/8"),
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    "afm-4.5b": {
        "model_type": "arcee",
        **sizes("2560/18432/36/20/4"),
        "vocab_size": 128004,
        "max_position_embeddings": 65536,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 20.0, "original_max_position_embeddings": 4096},
        "hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
}


WHOLE = json.loads(Path(__file__).with_name("published_configs.json").read_text())
CASES = {**PUBLISHED, **{case["folder"]: case["config"] for case in WHOLE}}
PRESET_OF = {**{name: name for name in PUBLISHED}, **{case["folder"]: case.get("preset") for case in WHOLE}}
REFUSED = {case["folder"]: case["refused"] for case in WHOLE if "refused" in case}


def network(config: DecoderConfig) -> dict[str, object]:
    """Return all that a network follows from, whichever fields say it."""
    return {
        "shapes": config.parameter_shapes,
        "attentions": config.attentions,
        "scale": config.attention_scale,
        "embedding": config.embedding_factor,
        "residual": config.residual_multiplier,
        "logits": config.logits_scaling,
        "caps": (config.attn_logit_softcapping, config.final_logit_softcapping),
        "eps": config.rms_norm_eps,
        "context": config.max_position_embeddings,
    }


@pytest.mark.parametrize("name", [name for name, preset in PRESET_OF.items() if preset])
def test_a_published_config_json_is_its_preset(name):
    preset, published = build(DecoderConfig, PRESETS[PRESET_OF[name]]), config_of(CASES[name])
    assert published.model_type == preset.model_type
    assert network(published) == network(preset)


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_a_published_config_json_is_written_as_it_was_read(name):
    published = config_of(CASES[name])
    written = config_of(json.loads(json.dumps(config_json(published))))
    assert written.model_type == published.model_type
    assert network(written) == network(published)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_config_json_of_another_network_is_refused_by_name(name):
    with pytest.raises(ModelError, match=REFUSED[name]):
        config_of(CASES[name])


def test_a_text_config_leaves_out_what_its_class_has():
    config = config_of(CASES["AIM-ZJU/HawkLlama_8b"])
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (4096, 32, 32)
    assert (config.vocab_size, config.context) == (128_512, 1536)


def test_qwen_of_a_million_tokens_has_the_context_of_one_chunk():
    raw = CASES["Qwen/Qwen2.5-14B-Instruct-1M"]
    assert config_of(raw).context == 262_144 - 8192
    assert config_of({**raw, "max_position_embeddings": 32_768}).context == 32_768
    chunks = raw["dual_chunk_attention_config"]
    for changes in ({"sparse_attention_enabled": True}, {"local_size": 262_144}, {"chunk_size": "many"}):
        with pytest.raises(ModelError, match="dual_chunk_attention_config must have chunk_size, local_size"):
            config_of({**raw, "dual_chunk_attention_config": {**chunks, **changes}})


@pytest.mark.parametrize(
    "classes",
    [
        {"AutoModelForCausalLM": "modeling_other.Phi3ForCausalLM"},
        {"AutoModelForCausalLM": "someone/model--modeling_phi.Phi3ForCausalLM"},
        {
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
            "AutoModel": "modeling_both_ways.Phi3Model",
        },
        "modeling_phi3.Phi3ForCausalLM",
    ],
)
def test_other_code_than_the_familys_own_is_refused(classes):
    with pytest.raises(ModelError, match="auto_map = "):
        config_of({**CASES["omi-health/sum-small"], "auto_map": classes})


@pytest.mark.parametrize(
    ("whole", "part", "tied"),
    [(True, False, True), (False, True, True), (False, None, False), (None, True, True), (None, None, False)],
)
def test_matrices_are_tied_if_the_whole_or_its_part_says_so(whole, part, tied):
    raw = CASES["AIM-ZJU/HawkLlama_8b"]
    text = {**raw["text_config"], **({} if part is None else {"tie_word_embeddings": part})}
    own = {} if whole is None else {"tie_word_embeddings": whole}
    assert config_of({**raw, **own, "text_config": text}).tie_word_embeddings is tied
    says_false = {**CASES["mlx-community/gemma-3-4b-it-bf16"], "tie_word_embeddings": False}
    assert not config_of(says_false).tie_word_embeddings  # though its class ties
    assert config_of({**says_false, "tie_word_embeddings": None}).tie_word_embeddings


SMOLVLM = CASES["HuggingFaceTB/SmolVLM2-500M-Video-Instruct"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("perceiver_config", {"resampler_depth": 6, "qk_layer_norms_perceiver": False}),
        ("is_composition", True),
        ("tf_legacy_loss", False),
        ("use_bfloat16", False),
    ],
)
def test_what_a_text_config_has_of_other_parts_is_passed_over(key, value):
    text = {**SMOLVLM["text_config"], key: value}
    assert config_of({**SMOLVLM, "text_config": text}) == config_of(SMOLVLM)


def test_a_whole_model_with_code_of_its_own_is_refused_unless_the_code_is_ignored():
    classes = {"AutoModelForCausalLM": "modeling_both_ways.SmolVLM"}
    with pytest.raises(ModelError, match=r"auto_map = .* --ignore-key auto_map"):
        config_of({**SMOLVLM, "auto_map": classes})
    config = config_of({**SMOLVLM, "auto_map": classes}, ignored_keys=["auto_map"])
    assert config.ignored_keys == ("auto_map",)


@pytest.mark.parametrize(
    ("key", "value"),
    [("activation", "gelu"), ("parallel_attn", True), ("qk_layer_norms", True), ("use_resampler", True)],
)
def test_what_no_llama_has_is_refused(key, value):
    with pytest.raises(ModelError, match=f"does not read: {key} = "):
        config_of({**CASES["tiiuae/Falcon3-3B-Base"], key: value})


def test_norms_that_no_granite_has_are_refused():
    with pytest.raises(ModelError, match='normalization_function = "layernorm"'):
        config_of({**CASES["ankitdhiman/nero"], "normalization_function": "layernorm"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_cla": True}, "use_cla = true"),
        ({"use_qk_norm": False}, "use_qk_norm = false"),
        ({"use_rotary_pos_emb": False}, "use_rotary_pos_emb = false"),
        ({"norm_type": "hf_rms"}, 'norm_type = "hf_rms"'),
        ({"add_classification_head": True}, "add_classification_head = true"),
        ({"attention_head_dim": 64}, r"attention_head_dim must be the size of a head, 128 \(got 64\)"),
        ({"attention_head_dim": 64, "head_dim": None}, "attention_head_dim must be the size of a head, 128"),
    ],
)
def test_what_no_hunyuan_dense_has_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        config_of({**PUBLISHED["hunyuan-7b"], **changes})
