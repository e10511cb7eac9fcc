"""What is read from the `config.json` of a model that comes from anyone, and what is refused."""

import json

import pytest

from penstock.checkpoint.hf_folder import read_config
from penstock.core.errors import ModelError
from penstock.models.families import supported_families
from penstock.models.family.config_json import config_of

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
        ({"rope_theta": "10000"}, r"rope_theta of the rotary embedding must be a number \(got '10000'\)"),
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


def test_a_config_json_without_a_size_is_refused():
    raw = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    with pytest.raises(ModelError, match="vocab_size"):
        config_of({"model_type": "llama", **raw})


def test_a_refused_config_json_is_named_with_its_folder(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "pixtral", **SIZES}))
    with pytest.raises(ModelError) as refused:
        read_config(tmp_path)
    assert str(refused.value) == (
        f"{path}: This family of models is not supported (got 'pixtral'). {supported_families()}"
    )
