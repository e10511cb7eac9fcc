"""The [tune] section: names and patterns of layers, what is frozen or trained whole, and what is refused."""

from dataclasses import replace

import pytest

from penstock.core import config
from penstock.core.errors import ConfigError
from penstock.nn.linear.adapter_config import LINEAR_LAYERS, AdapterConfig
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.tune_config import TuneConfig
from tests.families import small_llama

MODEL = small_llama()
TIED = small_llama(tie_word_embeddings=True)
LORA = {"method": "lora", "rank": 2}


def checked(model=MODEL, **tune) -> AdapterConfig | None:
    built = config.build(TuneConfig, tune, where="tune")
    built.check_fit(model)
    built.frozen(model)
    return built.adapter_of(model)


@pytest.mark.parametrize(
    ("layers", "expected", "unembed"),
    [
        ("all-linear", LINEAR_LAYERS, False),
        (["q_proj", "v_proj"], ("query", "value"), False),
        (["gate_proj", "up", "down_proj", "lm_head"], ("gate", "up", "down"), True),
        ("self_attn", ("query", "key", "value", "output"), False),
        (r".*\.(o_proj|lm_head)|lm_head", ("output",), True),
        (r"layers\.1\.mlp\.down", ("down",), False),
    ],
)
def test_names_of_hugging_face_and_patterns_stand_for_layers(layers, expected, unembed):
    adapter = checked(**LORA, layers=layers)
    assert (adapter.layers, adapter.unembed) == (expected, unembed)
    assert config.build(AdapterConfig, config.dump(adapter)) == adapter, "as checkpoints keep it"


def test_blocks_exclusions_and_patterns_choose_layers_ranks_and_scales():
    adapter = checked(
        **LORA,
        alpha=4.0,
        layers_to_transform=[1],
        exclude_modules=["down_proj", r".*\.k_proj"],
        rank_pattern={"v_proj": 4, "layers.1.mlp.up": 3},
        alpha_pattern={"self_attn.q_proj": 1.0},
    )
    found = {name: own for name in MODEL.linear_layers if (own := adapter.of(name)) is not None}
    assert {name: (own.rank, own.alpha) for name, own in found.items()} == {
        "layers.1.attention.query": (2, 1.0),
        "layers.1.attention.value": (4, 4.0),
        "layers.1.attention.output": (2, 4.0),
        "layers.1.mlp.gate": (2, 4.0),
        "layers.1.mlp.up": (3, 4.0),
    }
    assert adapter.alike().rank == 4
    assert adapter.alike().of("layers.0.attention.query") is not None, "the plan's bound has all blocks"


def test_a_pattern_of_frozen_parameters_fits_whole_parts_of_names():
    twelve = replace(MODEL, num_hidden_layers=12)
    frozen = TuneConfig(freeze=("embed_tokens", "layers.1", r"layers\.[3-4]\.mlp", "q_proj.weight")).frozen(
        twelve
    )
    assert "embed.weight" in frozen
    assert {name.split(".")[1] for name in frozen if ".key." in name} == {"1"}, "and not 10 and 11"
    assert {name.split(".")[1] for name in frozen if ".mlp.up." in name} == {"1", "3", "4"}
    assert sum(name.endswith("query.weight") for name in frozen) == 12


def test_modules_to_save_are_found_in_the_model():
    adapter = checked(**LORA, layers="attention", modules_to_save=["embed_tokens", "norm", "mlp.gate_proj"])
    assert adapter.saved == ("embed", "layers.0.mlp.gate", "layers.1.mlp.gate", "norm")
    assert adapter.trains("layers.1.mlp.gate.weight")
    assert not adapter.trains("layers.1.mlp.up.weight")
    whole = checked(**LORA, layers="attention", modules_to_save=["layers.1.mlp"])
    assert whole.saved == ("layers.1.mlp.gate", "layers.1.mlp.up", "layers.1.mlp.down")
    with_sinks = small_llama(model_type="granite_swa")
    adapter = checked(with_sinks, **LORA, layers="mlp", modules_to_save=["layers.1.self_attn"])
    assert adapter.trains("layers.1.attention.sinks")
    assert adapter.trains("layers.1.attention.value.weight")
    assert not adapter.trains("layers.0.attention.sinks")


@pytest.mark.parametrize(
    ("tune", "model", "said"),
    [
        ({**LORA, "layers": "atention"}, MODEL, "does not have.*Did you mean 'attention'"),
        ({**LORA, "layers": ["q_proj", "vproj"]}, MODEL, "does not have.*Did you mean 'v_proj'"),
        ({**LORA, "layers": ".*layers.9.self_attn.q_proj"}, MODEL, "names no layer of the model, and blocks"),
        ({**LORA, "layers": "(x"}, MODEL, "tune.layers is not a regular expression"),
        ({**LORA, "layers_to_transform": [2]}, MODEL, r"does not have \(got 2\)\. Its blocks are 0 to 1"),
        (
            {**LORA, "exclude_modules": ["dwn_proj"]},
            MODEL,
            "exclude_modules has a pattern that fits no layer",
        ),
        ({**LORA, "rank_pattern": {"q_prj": 4}}, MODEL, "rank_pattern has a pattern that fits no layer"),
        ({**LORA, "rank_pattern": {"q_proj": 0}}, MODEL, "rank_pattern must have whole ranks from 1"),
        ({**LORA, "rank_pattern": {"k_proj": 17}}, MODEL, r"larger than the layer 'key'.*at most 16"),
        ({**LORA, "alpha_pattern": {"q_proj": 0.0}}, MODEL, "alpha_pattern must have numbers above 0"),
        ({"freeze": ["embed_tokns"]}, MODEL, "fits no parameter.*Did you mean 'embed_tokens'"),
        ({"freeze": [".*"]}, MODEL, "leaves nothing to learn"),
        ({**LORA, "freeze": ["mlp"]}, MODEL, "freeze is for tune.method 'full'"),
        ({"dropout": 0.1}, MODEL, "'full' has no adapter"),
        ({**LORA, "dropout": 1.0}, MODEL, "from 0.001 to 0.999"),
        (
            {**LORA, "dropout": 0.1, "layers": ["all", "lm_head"]},
            MODEL,
            "does not work with an adapter of the",
        ),
        ({"modules_to_save": ["norm"]}, MODEL, "modules_to_save is for adapters"),
        ({**LORA, "modules_to_save": ["lm_had"]}, MODEL, "Did you mean 'lm_head'"),
        ({**LORA, "modules_to_save": ["lm_head"]}, TIED, "Write 'embed_tokens'"),
        ({**LORA, "modules_to_save": ["gate_proj"]}, MODEL, "which has an adapter.*exclude_modules"),
        ({**LORA, "modules_to_save": ["up"], "base": "int4"}, MODEL, "and is rounded to int4"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_with_the_remedy(tune, model, said):
    with pytest.raises(ConfigError, match=said):
        checked(model, **tune)


def recipe(**changes) -> TrainConfig:
    raw = {
        "run": {"dir": "r", "steps": 1, "start_from": "base", "start_vocab_size": 90},
        "model": config.dump(MODEL),
        "data": {"corpora": {"c": {"path": "c"}}, "sequence_length": 8, "global_batch_size": 2},
    }
    return config.build(TrainConfig, {**raw, **changes})


@pytest.mark.parametrize(
    "tune", [{"freeze": ["embed_tokens", "layers.0"]}, {**LORA, "layers_to_transform": [1]}], ids=str
)
def test_a_pipeline_whose_stage_learns_nothing_is_refused(tune):
    with pytest.raises(ConfigError, match="Stage 0 of the pipeline learns nothing"):
        recipe(tune=tune, parallel={"pipeline": 2})
    recipe(tune=tune)
    if "method" in tune:
        recipe(tune={**tune, "modules_to_save": ["embed_tokens", "lm_head"]}, parallel={"pipeline": 2})


def test_whole_matrices_have_the_rows_of_new_tokens():
    assert recipe(tune=LORA).adapter.new_rows == 6
    assert recipe(tune={**LORA, "modules_to_save": ["embed_tokens", "lm_head"]}).adapter.new_rows == 0
    with pytest.raises(ConfigError, match=r"one of the two matrices.*Name both"):
        recipe(tune={**LORA, "modules_to_save": ["lm_head"]})


@pytest.mark.parametrize("text", ["mlp.*", "(q|k)_proj", "q_proj|nothing"])
def test_an_exclusion_that_would_leave_every_layer_adapted_is_refused(text):
    with pytest.raises(ConfigError, match="exclude_modules has a pattern that fits no layer"):
        checked(**LORA, exclude_modules=[text])


@pytest.mark.parametrize("text", ["down_proj", "mlp.up_proj", r".*\.mlp\..*", r"model\.layers\.0\..*"])
def test_an_exclusion_that_is_accepted_leaves_a_layer_out(text):
    assert any(checked(**LORA, exclude_modules=[text]).of(name) is None for name in MODEL.linear_layers)
