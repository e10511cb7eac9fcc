"""Folders of every family, read and written, against transformers; their numbers: test_family_numbers.py."""

import json
import os
from pathlib import Path

import pytest
import torch
from tests.tiny_models import longrope, of_every_family
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Ernie4_5Config,
    GlmConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    HeliumConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from penstock.checkpoint.hf import load_pretrained, save_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.core.config import build
from penstock.core.errors import ModelError, UsageError
from penstock.models import FAMILIES
from penstock.models.decoder.config import DecoderConfig as OurConfig
from penstock.models.family.config_json import config_json, config_of
from penstock.models.presets import PRESETS

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # logits of size 1, so that a wrong mask or position is far outside 1e-5
}


def rope(rope_type, **fields):
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **fields}


LLAMA3 = rope(
    "llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=4096)  # long: the mixing range is inside
NO_SPECIAL = {"pad_token_id": None, "eos_token_id": 5}  # theirs are above the vocabulary
GRANITE_4 = {
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 80,
    "layer_types": ["attention"] * 3,
    "attention_multiplier": 0.1,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
}
CONFIGS = {
    **of_every_family(**SMALL, **NO_SPECIAL),
    "llama2": LlamaConfig(**{**SMALL, "num_key_value_heads": 6}),
    "llama3": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama3-tied": LlamaConfig(**SMALL, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "llama-head-dim": LlamaConfig(**SMALL, head_dim=16),
    "llama-linear": LlamaConfig(**SMALL, rope_parameters=rope("linear", factor=2.0)),
    "llama-yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "llama-yarn-exact": LlamaConfig(**SMALL, rope_parameters={**YARN, "truncate": False, "beta_fast": 16.0}),
    "llama-yarn-mscale": LlamaConfig(**SMALL, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}),
    "llama-dynamic": LlamaConfig(
        **{**SMALL, "max_position_embeddings": 16}, rope_parameters=rope("dynamic", factor=2.0)
    ),
    "granite-neutral": GraniteConfig(**SMALL),
    "mistral-no-window": MistralConfig(**SMALL, sliding_window=None),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-window-of-no-layer": Qwen2Config(**SMALL, use_sliding_window=True, max_window_layers=28),
    "qwen3-biases-and-windows": Qwen3Config(
        **SMALL,
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=0,
    ),
    "qwen3-windows-in-turn": Qwen3Config(
        **SMALL,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral-all-windows": MinistralConfig(**SMALL, head_dim=8, sliding_window=5),
    "hunyuan-no-alpha": HunYuanDenseV1Config(**SMALL, head_dim=8, attention_bias=True),
    "phi3": Phi3Config(**SMALL, **NO_SPECIAL),
    "phi3-longrope": Phi3Config(
        **SMALL, **NO_SPECIAL, original_max_position_embeddings=24, rope_scaling=longrope(4)
    ),
    "phi3-longrope-part": Phi3Config(
        **{**SMALL, "num_attention_heads": 3, "num_key_value_heads": 1},
        **NO_SPECIAL,
        original_max_position_embeddings=24,
        rope_scaling={**longrope(6), "attention_factor": 1.3, "factor": 3.0},
        partial_rotary_factor=0.75,
    ),
    "llama-longrope": LlamaConfig(
        **SMALL,
        rope_parameters={
            **rope("longrope", factor=3.0, original_max_position_embeddings=24),
            **{name: longrope(4)[name] for name in ("short_factor", "long_factor")},
        },
    ),
    "granite4-no-positions": GraniteMoeHybridConfig(**SMALL, **GRANITE_4, attention_bias=True),
    "helium-biases": HeliumConfig(**SMALL, head_dim=8, attention_bias=True, mlp_bias=True),
    "ernie": Ernie4_5Config(**SMALL, head_dim=16),
    "ernie-biases": Ernie4_5Config(**SMALL, head_dim=16, use_bias=True, tie_word_embeddings=False),
    "glm-no-biases": GlmConfig(**SMALL, **NO_SPECIAL, head_dim=24, attention_bias=False),
    "smollm3": SmolLM3Config(**SMALL, **NO_SPECIAL, no_rope_layers=[1, 0, 1]),
    "seed-oss-output-bias": SeedOssConfig(
        **SMALL, head_dim=16, attention_bias=False, attention_out_bias=True, mlp_bias=True
    ),
}
VARIED = {config.model_type for config in CONFIGS.values()}
CONFIGS |= {
    name: config
    for name, config in of_every_family(**SMALL, **NO_SPECIAL).items()
    if config.model_type not in VARIED
}
IDS = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))


def test_every_family_is_compared():
    assert {config.model_type for config in CONFIGS.values()} == set(FAMILIES)


@pytest.fixture(params=CONFIGS, scope="module")
def reference(request, tmp_path_factory):
    """Return a transformers model, its folder and its logits."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)  # they start equal and hide a mix-up
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, model(IDS).logits


def test_a_folder_written_here_is_opened_by_transformers(reference, tmp_path):
    folder, expected = reference
    save_pretrained(load_pretrained(folder).state_dict(), read_config(folder), tmp_path / "out", eos_id=5)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert model.generation_config.eos_token_id == 5
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, expected, rtol=0, atol=1e-5)


def test_a_config_survives_the_round_trip(reference, tmp_path):
    folder, _ = reference
    config = read_config(folder)
    (tmp_path / "config.json").write_text(json.dumps(config_json(config)))
    assert config_json(read_config(tmp_path)) == config_json(config)


def test_num_parameters_counts_the_parameters_of_transformers(reference):
    folder, _ = reference
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert read_config(folder).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_same_model_in_transformers(name):
    config = build(OurConfig, PRESETS[name])
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_json(config)))
        ours = FAMILIES[config.model_type](config)
    stored = config.stored_rows
    shapes = {
        stored[name].tensor: (stored[name].num_rows, *parameter.shape[1:])
        for name, parameter in ours.named_parameters()
    }
    assert shapes == {name: parameter.shape for name, parameter in theirs.named_parameters()}


@pytest.mark.parametrize("name", ["phi3-longrope", "phi3-longrope-part", "llama-longrope"])
def test_longrope_equals_transformers_up_to_the_original_context_and_beyond(name, tmp_path):
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    found = {}
    with torch.no_grad():
        for longest in (24, 25):
            ours.limit_texts(longest)
            found[longest] = ours(IDS[:, :longest])
            expected = theirs(IDS[:, :longest]).logits
            torch.testing.assert_close(found[longest], expected, rtol=0, atol=1e-5)
    assert (found[24] - found[25][:, :24]).abs().max() > 1e-2


def test_the_first_spellings_of_longrope_are_read():
    raw = CONFIGS["phi3-longrope"].to_dict() | {"rope_parameters": None}
    rule = {key: longrope(4)[key] for key in ("short_factor", "long_factor")}
    expected = config_of({**raw, "rope_scaling": {"type": "longrope", **rule}})
    assert expected.rope_scaling.factor == 64 / 24
    for kind in ("su", "yarn"):
        assert config_of({**raw, "rope_scaling": {"type": kind, **rule}}) == expected


@pytest.fixture
def llama(tmp_path) -> tuple[Path, torch.nn.Module]:
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama3"]).eval()
    model.save_pretrained(tmp_path / "hf")
    return tmp_path / "hf", model


def test_a_folder_sharded_by_transformers_is_opened(llama, tmp_path):
    _, model = llama
    model.save_pretrained(tmp_path / "sharded", max_shard_size="50KB")
    assert (tmp_path / "sharded" / "model.safetensors.index.json").is_file()
    with torch.no_grad():
        torch.testing.assert_close(
            load_pretrained(tmp_path / "sharded")(IDS), model(IDS).logits, rtol=0, atol=1e-5
        )


def test_a_folder_sharded_here_is_opened_by_transformers(llama, tmp_path):
    folder, model = llama
    save_pretrained(
        load_pretrained(folder).state_dict(), read_config(folder), tmp_path / "out", max_shard_bytes=50_000
    )
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    with torch.no_grad():
        reopened = AutoModelForCausalLM.from_pretrained(tmp_path / "out")(IDS).logits
    torch.testing.assert_close(reopened, model(IDS).logits, rtol=0, atol=1e-5)


def test_bfloat16_export_is_read_as_bfloat16(llama, tmp_path):
    folder, _ = llama
    state = load_pretrained(folder).state_dict()
    save_pretrained(state, read_config(folder), tmp_path / "out", dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert load_pretrained(tmp_path / "out").embed.weight.dtype == torch.bfloat16
    assert load_pretrained(tmp_path / "out", dtype=torch.float32).embed.weight.dtype == torch.float32


def test_configs_in_the_spelling_of_transformers_4_are_read(llama):
    folder, _ = llama
    expected = read_config(folder)
    raw = json.loads((folder / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    (folder / "config.json").write_text(json.dumps({**raw, "rope_scaling": scaling}))
    assert read_config(folder) == expected


def rewrite(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **changes}))


def test_a_missing_layer_is_named(llama):
    rewrite(llama[0], num_hidden_layers=4)
    with pytest.raises(
        ModelError, match=r"missing: model\.layers\.3\.input_layernorm\.weight, .* and 6 more"
    ):
        load_pretrained(llama[0])


def test_a_surplus_layer_is_named(llama):
    rewrite(llama[0], num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.2\.input_layernorm\.weight"):
        load_pretrained(llama[0])


def test_weights_that_are_another_users_are_not_said_to_be_missing(llama, monkeypatch):
    monkeypatch.setattr(
        os, "access", lambda path, _: not str(path).endswith(".safetensors")
    )  # root reads all
    with pytest.raises(ModelError, match=r"model\.safetensors may not be read by this user"):
        load_pretrained(llama[0])


def test_a_wrong_shape_is_named_with_both_shapes(llama):
    rewrite(llama[0], vocab_size=98)
    with pytest.raises(ModelError, match=r"has shape \(97, 48\), but config.json makes it \(98, 48\)"):
        load_pretrained(llama[0])


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "llama4"])
def test_a_family_that_is_not_supported_is_named_with_those_that_are(llama, model_type):
    rewrite(llama[0], model_type=model_type)
    with pytest.raises(ModelError, match=rf"not supported \(got '{model_type}'\). Supported: arcee,"):
        load_pretrained(llama[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be silu.*computes llama with that activation only"),
        ({"quantization_config": {"bits": 4}}, "Quantised"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "longrope: short_factor must be a list of numbers",
        ),
        ({"rope_parameters": {"rope_type": "longrun", "factor": 2.0}}, "rope_type.*longrun.*longrope"),
        ({"partial_rotary_factor": 0.5}, r"llama models rotate whole heads.*got 0.5\)"),
        (
            {
                "model_type": "qwen2",
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "chunked_attention"],
            },
            "layer_types must name full_attention or sliding_attention for each of the 3",
        ),
        ({"num_attention_heads": 7}, "num_attention_heads|num_key_value_heads"),
    ],
)
def test_what_cannot_be_built_is_refused_with_its_name(llama, change, message):
    rewrite(llama[0], **change)
    with pytest.raises(ModelError, match=message):
        load_pretrained(llama[0])


def test_a_truncated_file_is_refused(llama):
    path = llama[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        load_pretrained(llama[0])


def test_pickled_weights_are_refused(llama):
    (llama[0] / "model.safetensors").unlink()
    torch.save({}, llama[0] / "pytorch_model.bin")
    with pytest.raises(ModelError, match="opening a pickle can run code"):
        load_pretrained(llama[0])


def test_an_index_that_points_outside_its_folder_is_refused(llama):
    (llama[0] / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x.safetensors"}}')
    with pytest.raises(ModelError, match=r"missing in its folder .*Download the whole folder again"):
        load_pretrained(llama[0])


def test_a_folder_with_files_in_it_is_never_overwritten(llama):
    folder, _ = llama
    with pytest.raises(UsageError, match="not empty"):
        save_pretrained(load_pretrained(folder).state_dict(), read_config(folder), folder)
