"""Keys of `config.json`: the tables against transformers' classes, and rules of RoPE against its logits."""

import json
from dataclasses import MISSING, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.in_process import run_cli
from tests.tiny_models import SHAPE, save_talker, save_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.checkpoint.hf import load_pretrained, save_pretrained
from penstock.checkpoint.hf_folder import read_config
from penstock.checkpoint.start import find_start
from penstock.core.errors import ModelError
from penstock.engine.model_runner.open import open_config, open_model
from penstock.models.families import FAMILY
from penstock.models.family.base import IGNORED_KEYS, SIZES
from penstock.models.family.config_json import config_of
from penstock.testing.corpora import write_corpus

IDS = torch.randint(0, SHAPE["vocab_size"], (2, 70), generator=torch.Generator().manual_seed(0))


OPENED = {
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * SHAPE["num_hidden_layers"]}
}
"""Keys without which a family's folder is refused."""
IN_TRANSFORMERS = {"granitemoehybrid": {"mamba_n_heads": 1}, "cwm": {"bos_token_id": 0}}
"""Keys without which a class of transformers refuses a small shape."""


def raw_of(model_type):
    own = OPENED.get(model_type, {})
    return {"model_type": model_type, **{key: SHAPE[key] for key in SIZES}, "num_key_value_heads": 2, **own}


@pytest.mark.parametrize("model_type", FAMILY)
def test_defaults_are_those_of_the_class_of_transformers(model_type):
    family = FAMILY[model_type]
    found = {field.name: field.default for field in fields(CONFIG_MAPPING[model_type])}
    assert MISSING not in found.values()
    expected = {key: value for key, value in found.items() if key not in SIZES | family.ignored}
    assert family.defaults == expected
    assert family.sizes.items() <= found.items()


def test_how_answers_are_drawn_is_bookkeeping():
    drawn = set(
        GenerationConfig._get_default_generation_params()
    )  # what transformers takes out of config.json
    for family in FAMILY.values():
        assert drawn <= family.ignored
        assert not family.ignored & (family.keys | family.defaults.keys())


@pytest.mark.parametrize("model_type", FAMILY)
def test_what_transformers_writes_of_a_family_is_known(model_type):
    shape = {**SHAPE, **OPENED.get(model_type, {}), **IN_TRANSFORMERS.get(model_type, {})}
    written = json.loads(CONFIG_MAPPING[model_type](**shape).to_json_string(use_diff=False))
    config_of({**written, "model_type": model_type})


@pytest.mark.parametrize("model_type", FAMILY)
@given(
    key=st.text(st.characters(categories=["Ll", "Nd"], include_characters="_"), min_size=1),
    value=st.none() | st.booleans() | st.integers() | st.text(max_size=200) | st.lists(st.integers()),
)
@examples(30)
def test_a_key_is_read_or_harmless_or_refused_by_name_and_value(model_type, key, value):
    raw, family = raw_of(model_type), FAMILY[model_type]
    if key in family.keys:
        return
    if family.is_harmless(key, value):
        assert config_of({**raw, key: value}) == config_of(raw)
        return
    with pytest.raises(ModelError) as refused:
        config_of({**raw, key: value})
    assert f"{key} = {json.dumps(value)[:60]}" in str(refused.value)
    assert f"--ignore-key {key}." in str(refused.value)
    config = config_of({**raw, key: value}, ignored_keys=[key, "absent"])
    assert config.ignored_keys == (key,)


@pytest.mark.parametrize(
    ("key", "neutral", "harmful"),
    [
        ("is_causal", True, False),
        ("use_mrope", False, True),
        ("rope_interleaved", False, True),
        ("chunk_size_feed_forward", 0, 4),
        ("mlp_bias", False, True),
        ("embedding_multiplier", 1.0, 3.0),
        ("pruned_heads", {}, {"0": [1]}),
        ("final_logit_softcapping", None, 30.0),
        ("per_layer_config", None, {"1": {"head_dim": 8}}),
    ],
)
def test_a_key_that_is_not_read_passes_at_its_neutral_value_only(key, neutral, harmful):
    config_of({**raw_of("qwen2"), key: neutral})
    with pytest.raises(ModelError, match=f"does not read: {key} = "):
        config_of({**raw_of("qwen2"), key: harmful})


def test_several_unread_keys_are_named_at_once():
    with pytest.raises(ModelError, match=r"keys that .*: b = 2, a = 1\. .* --ignore-key b --ignore-key a\."):
        config_of({**raw_of("llama"), "b": 2, "a": 1})


@pytest.mark.parametrize("key", ["hidden_act", "rope_theta", "rope_scaling", "rope_scaling.factor"])
def test_a_key_that_is_read_cannot_be_ignored(key):
    raw = {**raw_of("llama"), "hidden_act": "gelu", "rope_theta": 2.0, "rope_scaling": {"factor": 2.0}}
    with pytest.raises(ModelError, match=f"{key} of config.json is read, and cannot be ignored"):
        config_of(raw, ignored_keys=[key])


@pytest.mark.parametrize("rule", ["default", "linear", "yarn"])
def test_an_unknown_key_inside_the_rule_of_rope_can_be_ignored_by_its_path(rule):
    scaling = {"rope_type": rule, "factor": 2.0, "mrope_section": [1, 2]}
    raw = {**raw_of("qwen2"), "max_position_embeddings": 64, "rope_scaling": scaling}
    with pytest.raises(ModelError, match=r"mrope_section.*--ignore-key rope_scaling\.mrope_section"):
        config_of(raw)
    config = config_of(raw, ignored_keys=["rope_scaling.mrope_section"])
    assert config.ignored_keys == ("rope_scaling.mrope_section",)
    known = {key: value for key, value in scaling.items() if key != "mrope_section"}
    assert config.rope_scaling == config_of({**raw, "rope_scaling": known}).rope_scaling


def test_a_folder_cannot_permit_its_own_unread_keys():
    raw = {**raw_of("llama"), IGNORED_KEYS: ["mup_scale"]}
    assert config_of(raw).ignored_keys == ("mup_scale",)
    with pytest.raises(ModelError, match="does not read: mup_scale"):
        config_of({**raw, "mup_scale": 0.5})
    with pytest.raises(ModelError, match="penstock_ignored_keys must be a list"):
        config_of({**raw, IGNORED_KEYS: "mup_scale"})


@pytest.fixture
def llama(tmp_path):
    save_tiny_model("llama", tmp_path / "hf")
    return tmp_path / "hf"


def rewrite(folder, *, without=(), **changes):
    raw = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if key not in without}
    (folder / "config.json").write_text(json.dumps({**kept, **changes}))


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
TOP = {"original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": YARN, **TOP},
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 100}, **TOP},
        {"rope_scaling": LLAMA3, **TOP},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, **TOP},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, **TOP},
        {"rope_theta": 500.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}, **TOP},
        {**TOP},
        {"rope_scaling": {**YARN, "truncate": None}},
        {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 300.0}, "rope_theta": 700.0},
        {"rope_scaling": {**YARN, "rope_theta": 90.0}, "rope_parameters": {"rope_theta": 300.0}},
        {"rope_scaling": {}, "rope_parameters": {**LLAMA3, "rope_theta": 300.0}, "rope_theta": 700.0},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 700.0},
    ],
)
def test_logits_are_those_of_transformers_wherever_rope_is_written(llama, changes):
    rewrite(llama, without=("rope_parameters",), **changes)
    theirs = AutoModelForCausalLM.from_pretrained(llama).eval()
    with torch.no_grad():
        expected, found = theirs(IDS).logits, load_pretrained(llama)(IDS)
    assert expected.std() > 0.05
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_base_that_transformers_drops_is_refused(llama):
    rewrite(llama, rope_parameters={"rope_type": "default", "rope_theta": 300.0}, rope_scaling=YARN)
    assert AutoConfig.from_pretrained(llama).rope_parameters["rope_theta"] == LlamaConfig.default_theta
    with pytest.raises(ModelError, match=r'got 300.0\). Write "rope_theta": 300.0 into rope_scaling'):
        read_config(llama)


def test_an_ignored_key_is_warned_of_once_and_recorded_wherever_the_folder_goes(llama, tmp_path, caplog):
    rewrite(llama, mup_scale=0.5)
    with pytest.raises(ModelError, match=r"config\.json: .* mup_scale = 0\.5"):
        load_pretrained(llama)
    ignored = ["mup_scale", "of_another_folder"]
    model, _ = open_model(str(llama), ignored_keys=ignored)
    start = find_start(llama, ignored_keys=ignored)
    assert open_config(str(llama), ignored_keys=ignored).ignored_keys == ("mup_scale",)
    assert model.config.ignored_keys == start.model.ignored_keys == ("mup_scale",)
    assert [record.getMessage().count("mup_scale") for record in caplog.records] == [1]
    save_pretrained(model.state_dict(), model.config, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())[IGNORED_KEYS] == ["mup_scale"]
    assert read_config(tmp_path / "out").ignored_keys == ("mup_scale",)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs(IDS).logits.shape == (*IDS.shape, SHAPE["vocab_size"])


def recipe_with_unknown_key(tmp_path):
    """Return a folder whose config.json has the unknown key mup_scale, and a recipe that starts from it."""
    model = save_talker(tmp_path / "model", context=64)
    rewrite(model, mup_scale=0.5)
    corpus = write_corpus(tmp_path / "corpus", [[1, 2, 3]] * 40, vocab_size=100)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'[run]\ndir = "{tmp_path / "run"}"\nsteps = 1\nstart_from = "{model}"\n'
        f'[data]\nsequence_length = 8\nglobal_batch_size = 2\n[data.corpora.c]\npath = "{corpus}"\n'
    )
    return model, recipe


def test_a_run_that_recorded_an_ignored_key_resumes_without_naming_it_again(tmp_path, caplog):
    model, recipe = recipe_with_unknown_key(tmp_path)
    first = run_cli("train", recipe, "--ignore-key", "mup_scale")
    assert first.returncode == 0, first.stderr
    again = run_cli("train", recipe, "--set", "run.steps=2")
    assert again.returncode == 0, again.stderr
    assert "the key mup_scale is ignored" in again.stderr + caplog.text
    rewrite(model, another=1)
    refused = run_cli("train", recipe, "--set", "run.steps=3")
    assert refused.returncode == 1
    assert "another = 1. The model may need it." in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        "generate {model} --prompt the --max-tokens 1",
        "export {model} --out {out}",
        "eval {model} --corpus {corpus} --rows 1 --sequence-length 8",
        "data teach {corpus} --model {model} --out {out} --top-k 2 --sequence-length 8",
        "kernels {model} --quick",
        "train {recipe} --dry-run",
        "recipes check {recipe}",
        "launch local {recipe} --dry-run",
        "launch slurm {recipe} --dry-run",
    ],
)
def test_every_command_that_opens_a_folder_can_ignore_a_key(tmp_path, caplog, words):
    model, recipe = recipe_with_unknown_key(tmp_path)
    corpus = tmp_path / "corpus"
    given = words.format(
        model=model, corpus=corpus, recipe=recipe, out=tmp_path / "out", folder=tmp_path
    ).split()
    refused = run_cli(*given)
    assert refused.returncode == 1, refused.stderr
    assert "mup_scale = 0.5. The model may need it." in " ".join(refused.stderr.split())
    done = run_cli(*given, "--ignore-key", "mup_scale")
    assert done.returncode == 0, done.stderr
    assert "the key mup_scale is ignored" in done.stderr + caplog.text
