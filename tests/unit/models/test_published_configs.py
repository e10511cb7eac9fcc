"""Published `config.json` files open.

Keys of special tokens, dtypes and versions are left out where a family does not have them to itself.
"""

import pytest

from penstock.core.errors import ModelError
from penstock.models.family.config_json import config_of

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


def sizes(text: str) -> dict[str, int]:
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    return dict(zip(names.split(), map(int, text.split("/")), strict=True))


PUBLISHED = {
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
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_json_opens(name):
    config = config_of(PUBLISHED[name])
    assert (config.size_of_head, config.rope_scaling.alpha) == (128, 1000.0)


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
