"""What is read from the `config.json` of a model that comes from anyone, and what is refused."""

import json
from dataclasses import fields, replace
from itertools import product
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.families import small_llama

from penstock.checkpoint.hf_folder import read_config
from penstock.core.errors import ConfigError, ModelError
from penstock.models.decoder.config import DecoderConfig
from penstock.models.families import supported_families
from penstock.models.family.config_json import config_json, config_of
from penstock.nn.rope import query_scales, rope_tables
from penstock.nn.rope_scaling import RopeScaling, RopeType

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 100.0}, r"vocab_size has the wrong type \(got 100.0\)"),
        ({"num_hidden_layers": "2"}, r"num_hidden_layers has the wrong type \(got '2'\)"),
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings has the wrong type \(got 'false'\)"),
        ({"max_position_embeddings": None}, "max_position_embeddings has the wrong type"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be positive"),
        (
            {"rope_theta": "10000"},
            r"rope_theta of the rotary embedding must be a number, 0 or more \(got '10000'\)",
        ),
        ({"rope_scaling": [2]}, "rope_scaling must be one rule for all layers"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor of the rotary embedding must be"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "must be one rule for all layers"),
    ],
)
def test_a_config_json_with_something_else_where_a_number_belongs_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        config_of({"model_type": "llama", **SIZES, **changes})


def test_null_for_what_only_other_families_have_is_nothing():
    raw = {"model_type": "qwen2", **SIZES, "mlp_bias": None, "attention_multiplier": None}
    assert config_of(raw) == config_of({"model_type": "qwen2", **SIZES})


LLAMA = {"model_type": "llama", **SIZES}
SMOLLM3 = {"model_type": "smollm3"}
GRANITE_SWA = {"model_type": "granite_swa"}
GRANITE_4 = {"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["attention"] * 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "ministral", "num_hidden_layers": 50_000_000},
            "num_hidden_layers can be at most 2,000",
        ),
        ({"model_type": "cwm", "num_hidden_layers": "many"}, "num_hidden_layers has the wrong type"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
            "max_window_layers has",
        ),
        ({**SMOLLM3, "no_rope_layers": [1]}, "no_rope_layers must have 0 or 1 for each of the 2 layers"),
        ({**SMOLLM3, "no_rope_layers": "none"}, "no_rope_layers must have 0 or 1"),
        ({**SMOLLM3, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be a number of layers"),
        ({**SMOLLM3, "layer_types": ["sliding_attention"] * 2}, "says that no layer has a window"),
        ({**SMOLLM3, "layer_types": 5}, "layer_types"),
        *(
            ({**family, "layer_types": ["full_attention", "sliding_attention"]}, "that no layer has a window")
            for family in (
                {"model_type": "exaone4", "sliding_window": None},
                {"model_type": "gemma2", "sliding_window": None},
                {"model_type": "gemma3_text", "sliding_window": None},
                {"model_type": "ministral", "sliding_window": None},
                {"model_type": "olmo3", "sliding_window": None},
                {"model_type": "qwen2", "sliding_window": 8},
                {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": None},
            )
        ),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern must be"),
        ({"model_type": "gemma3_text", "rope_parameters": False}, "a rule for full_attention and one for"),
        ({**GRANITE_4, "layer_types": 5}, "layer_types must name the kind of each of the 2 layers"),
        ({**GRANITE_4, "layers_block_type": ["mamba"] * 2}, "Mamba layers or experts"),
        ({**GRANITE_4, "layers_block_type": []}, "layer_types must name the kind of each of the 2 layers"),
        ({**GRANITE_4, "position_embedding_type": "alibi"}, "position_embedding_type must be"),
        ({**GRANITE_4, "position_embedding_type": ["rope"]}, "position_embedding_type must be"),
        (
            {**GRANITE_4, "position_embedding_type": "rope", "partial_rotary_factor": 0.5},
            "rotate whole heads",
        ),
        ({"model_type": "glm", "partial_rotary_factor": 0.0}, "partial_rotary_factor must give"),
        (
            {"model_type": "phi3", "rope_parameters": {"partial_rotary_factor": 0}},
            "partial_rotary_factor must",
        ),
        ({"model_type": "cwm", "rope_theta": 7000.0}, "rope_theta is outside of rope_parameters"),
        ({"model_type": "bert", "layer_types": 5, "block_types": True}, "not supported"),
        ({"model_type": ["llama"]}, "not supported"),
        ({"model_type": {}, "text_config": {"model_type": "cwm"}}, "config.json lacks"),
        ({"rope_parameters": {"rope_type": ["a"]}}, "Unknown rope_type"),
        ({"rope_parameters": 0}, "must be one rule for all layers"),
        ({"rope_scaling": {"rope_type": "", "factor": 2.0}}, r"has no rope_type"),
        ({"rope_scaling": {"alpha": 7.0, "factor": 2.0}}, r"has no rope_type \(got 'alpha, factor'\)"),
        ({"rope_scaling": {"type": "dynamic", "factor": -2.0}}, r"must be a number, 0 or more \(got -2.0\)"),
        ({"quantization_config": {"quant_method": "eetq"}}, r"cannot be opened \(got 'eetq'\)"),
        ({"quantization_config": {"bits": 3}}, r"cannot be opened \(got \{'bits': 3\}\)"),
        ({"quantization_config": ["int4"]}, r"cannot be opened \(got \['int4'\]\)"),
        ({"rope_theta": 10**400}, "must be a number"),
        ({**GRANITE_SWA, "layer_rope_theta": [10**400, 0]}, "none negative or infinite"),
        ({**GRANITE_SWA, "layer_rope_theta": [-1.0, 0]}, "none negative or infinite"),
        ({**GRANITE_SWA, "layer_rope_theta": [True, "0"]}, "layer_rope_theta must be a list of numbers"),
        ({**GRANITE_SWA, "layer_rope_theta": [0]}, "a number for each of the 2 layers"),
    ],
)
def test_odd_values_of_untrusted_configs_are_refused_in_words(changes, message):
    with pytest.raises(ModelError, match=message):
        config_of({"model_type": "llama", **SIZES, **changes})


def test_phi_4_mini_opens_as_published():
    """Its keys and values, with fewer layers."""
    short, long = [1.0] * 48, [1.0 + step for step in range(48)]
    raw = {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o"},
        "bos_token_id": 199999, "embd_pdrop": 0.0, "eos_token_id": 199999, "full_attn_mod": 1,
        "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
        "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "model_type": "phi3", "num_attention_heads": 24, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "pad_token_id": 199999, "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 262144,
        "rope_scaling": {"long_factor": long, "short_factor": short, "type": "longrope"},
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
        "use_cache": True, "vocab_size": 200064,
    }  # fmt: skip
    config = config_of(raw)
    assert (config.rotated_dims, config.context) == (96, 131_072)
    assert config.rope_scaling is not None
    assert (config.rope_scaling.factor, config.rope_scaling.long_factor) == (32.0, tuple(long))


def test_keys_that_are_null_are_absent():
    assert config_of({**LLAMA, "partial_rotary_factor": None}) == config_of(LLAMA)
    half = {**LLAMA, "model_type": "glm", "num_key_value_heads": 2, "head_dim": 16}
    assert config_of({**half, "partial_rotary_factor": None}).partial_rotary_factor == 0.5
    empty = config_of({**LLAMA, "model_type": "cwm", "head_dim": 16, "rope_parameters": {}})
    assert (empty.rope_theta, empty.rope_scaling) == (1e6, None)


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_granite_4_with_and_without_positions_survives_the_round_trip(part):
    config = DecoderConfig(**SIZES, model_type="granitemoehybrid", partial_rotary_factor=part)
    read = config_of(config_json(config))
    explicit = {"head_dim": read.head_dim, "attention_multiplier": config.attention_scale}
    assert read == replace(config, **explicit)
    assert hash(read) == hash(replace(config, **explicit))


def test_a_part_of_a_head_that_config_json_cannot_say_is_refused():
    for model_type, part in (("granitemoehybrid", 0.5), ("phi3", 0.0), ("glm", 0.0)):
        with pytest.raises(ConfigError, match="partial_rotary_factor must"):
            DecoderConfig(**SIZES, model_type=model_type, partial_rotary_factor=part)


def test_a_config_json_without_a_size_is_refused():
    raw = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    with pytest.raises(ModelError, match="vocab_size"):
        config_of({"model_type": "llama", **raw})


@pytest.mark.parametrize("model_type", ["exaone4", "granitemoehybrid", "olmo3", "smollm3"])
def test_a_config_json_without_layers_is_refused_where_a_family_counts_them(model_type):
    raw = {name: value for name, value in SIZES.items() if name != "num_hidden_layers"}
    with pytest.raises(ModelError, match=r"config\.json lacks num_hidden_layers"):
        config_of({"model_type": model_type, **raw})


ROPE_FIELDS = [field.name for field in fields(RopeScaling) if field.name != "rope_type"]
NUMBERS = [-1, 0, 0.5, 1, 2, 7.5, 10**30, 1e300, float("inf"), float("nan"), [0.5] * 4, [10**30] * 4, [1.0]]


@given(
    family=st.sampled_from(["llama", "hunyuan_v1_dense", "ministral3", "phi3"]),
    kind=st.sampled_from([*get_args(RopeType), "dynamic"]),
    theta=st.sampled_from([0.5, 1, 10_000.0]),
    head_dim=st.sampled_from([2, 8]),
    rule=st.fixed_dictionaries({}, optional={name: st.sampled_from(NUMBERS) for name in ROPE_FIELDS}),
)
@examples(900)
def test_a_rotary_embedding_is_refused_in_words_or_has_finite_angles(family, kind, theta, head_dim, rule):
    usual = {"factor": 2.0, **({"original_max_position_embeddings": 8} if kind != "dynamic" else {})}
    if kind == "longrope":
        usual |= {"short_factor": [1.0] * (head_dim // 2), "long_factor": [2.0] * (head_dim // 2)}
    elif kind == "llama3":
        usual |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    elif family == "ministral3":
        usual |= {"llama_4_scaling_beta": 0.1}
    given_rule = {**usual, **rule, "rope_type": kind, "rope_theta": theta}
    try:
        config = config_of({"model_type": family, **SIZES, "head_dim": head_dim, "rope_scaling": given_rule})
    except ModelError:
        return
    positions = torch.arange(20)[None]
    for one, longest in product([attention.rope for attention in config.attentions], (8, 64)):
        tables = rope_tables(
            positions,
            head_dim=head_dim,
            rule=one,
            max_positions=config.max_position_embeddings,
            longest_text=longest,
            dtype=torch.float32,
        )
        assert all(table.isfinite().all() for table in tables), config.rope_scaling
    if family == "ministral3":
        assert query_scales(positions, config.rope_scaling, torch.float32).isfinite().all()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            {"rope_type": "dynamic", "factor": 10**30},
            "factor must be at least 1, and at most 1,000,000,000,000",
        ),
        ({"rope_type": "dynamic", "factor": 2.0, "head_dim": 2}, "dynamic needs more than 2 rotated dim"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}, "yarn needs a rope_theta above 1"),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1},
            "original_max_position_embeddings must be at least 2",
        ),
        (
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 0, "high_freq_factor": 4.0},
            "low_freq_factor must be at least 1e-12",
        ),
    ],
)
def test_a_rotary_embedding_out_of_range_is_named(rule, message):
    head_dim = rule.pop("head_dim", 8)
    with pytest.raises(ModelError, match=message):
        config_of({**LLAMA, "head_dim": head_dim, "rope_scaling": rule})


def test_a_refused_config_json_is_named_with_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "pixtral", **SIZES}))
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert str(refused.value) == (
        f"{path}: This family of models is not supported (got 'pixtral'). {supported_families()}"
    )


GEMMA_3 = {"model_type": "gemma3_text", **SIZES, "num_hidden_layers": 4, "head_dim": 16}


def test_gemma_3_is_read_in_both_spellings():
    rules = {
        "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 5e3, "rope_type": "default"},
    }
    kinds = ["sliding_attention", "full_attention"] * 2
    new = config_of({**GEMMA_3, "rope_parameters": rules, "layer_types": kinds, "sliding_window": 7})
    old = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 5e3}
    assert new == config_of({**GEMMA_3, **old, "sliding_window_pattern": 2, "sliding_window": 7})
    assert new.layer_rope_theta == (5e3, 1e6) * 2
    assert [one.rope.scaling is not None for one in new.attentions] == [False, True] * 2
    assert config_of(config_json(new)) == new
    assert new.attention_scale == 1 / 16  # query_pre_attn_scalar is 256 where there is none


def test_a_wrapped_gemma_3_leaves_out_the_sizes_of_its_class():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    config = config_of({"model_type": "gemma3", "text_config": {**text, "intermediate_size": 10240}})
    assert (config.vocab_size, config.num_attention_heads, config.key_value_heads) == (262_208, 8, 4)
    assert config.num_parameters == 3_880_263_168  # of google/gemma-3-4b, the text part
    assert config.windows.count(None) == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}}, "a rule for full_attention and one for sliding_attention"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ({"query_pre_attn_scalar": 10**400}, "query_pre_attn_scalar must be a positive number"),
        ({"layer_types": []}, "layer_types must name full_attention or sliding_attention for each"),
        ({"sliding_window_pattern": 0.5}, "sliding_window_pattern must be a number of layers"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"hidden_activation": "gelu"}, "hidden_activation must be gelu_pytorch_tanh"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "a rope_theta of their own, and no other rule",
        ),
    ],
)
def test_what_no_gemma_3_has_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        config_of({**GEMMA_3, **changes})


GEMMA_2 = {
    "model_type": "gemma2",
    **SIZES,
    "num_hidden_layers": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "cache_implementation": "hybrid",
    "sliding_window_size": 4096,
}


def test_gemma_2_has_the_defaults_of_its_class():
    config = config_of(GEMMA_2)
    assert config.windows == (4096, None) * 2
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (50.0, 30.0)
    assert config.attention_scale == 1 / 16
    assert config.tie_word_embeddings
    assert config_of(config_json(config)) == config


def test_softcaps_that_are_null_are_none():
    nulls = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = config_of({**GEMMA_2, **nulls, "query_pre_attn_scalar": 144})
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == (None, None)
    assert config.attention_scale == 1 / 12
    written = config_json(config)
    assert {key: written[key] for key in nulls} == nulls  # else transformers' defaults would apply
    assert config_of(written) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 0.0}, "attn_logit_softcapping must be positive"),
        ({"final_logit_softcapping": -30.0}, "final_logit_softcapping must be positive"),
        ({"final_logit_softcapping": "30"}, "final_logit_softcapping has the wrong type"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number"),
        ({"layer_types": ["full_attention"]}, "for each of the 4 layers"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
    ],
)
def test_what_no_gemma_2_has_is_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        config_of({**GEMMA_2, **changes})


def test_softcaps_belong_to_gemma_2():
    with pytest.raises(ConfigError, match=r"not supported by llama models.*Set model_type to gemma2"):
        small_llama(attn_logit_softcapping=50.0)


def test_gemma_1_takes_gelu_for_its_approximation_as_transformers_does():
    gemma = {"model_type": "gemma", **SIZES}
    assert config_of({**gemma, "hidden_act": "gelu"}) == config_of(gemma)
    with pytest.raises(ModelError, match=r"hidden_activation must be gelu_pytorch_tanh \(got 'gelu'\)"):
        config_of({**gemma, "hidden_activation": "gelu"})


def test_windows_of_exaone_4_in_letters_and_numbers():
    exaone = {"model_type": "exaone4", **SIZES, "num_hidden_layers": 6, "rope_theta": 1e6, "head_dim": 8}
    letters = config_of({**exaone, "sliding_window_pattern": "LLG"})
    assert letters == config_of({**exaone, "sliding_window_pattern": 3})
    assert letters.layer_rope_theta == (1e6, 1e6, 0.0) * 2
    assert config_of(config_json(letters)) == letters
    assert config_of({**exaone, "sliding_window": None}).layer_rope_theta is None
    with pytest.raises(ModelError, match='or letters such as "LLLG"'):
        config_of({**exaone, "sliding_window_pattern": "LX"})


def test_olmo_3_has_one_base_for_all_layers():
    olmo = {"model_type": "olmo3", **SIZES, "num_hidden_layers": 4, "head_dim": 8}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    with pytest.raises(
        ModelError, match="layer_types must name full_attention or sliding_attention for each"
    ):
        config_of({**olmo, "layer_types": 5})
    config = config_of({**olmo, "rope_scaling": yarn, "rope_theta": 500_000})
    assert [one.rope.scaling is not None for one in config.attentions] == [False, False, False, True]
    assert config_of(config_json(config)) == config
    with pytest.raises(ModelError, match="another rope_theta than full layers"):
        config_of({**olmo, "rope_theta": 10_000})
