"""run.start_from: where a recipe's model comes from, what is pinned, and what is refused."""

import fcntl
import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from penstock.checkpoint.hf_folder import identity_of
from penstock.core import config
from penstock.core.errors import CheckpointError, ConfigError, ModelError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.testing.corpora import write_corpus
from penstock.train.planning.devices import config_of
from penstock.train.resolve.load import build_for_others, build_recipe
from tests.tiny_models import CONFIGS, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder


def recipe(tmp_path, model, *, vocab_size=100, **run):
    path = write_corpus(tmp_path / "corpus", [[1, 2, 3]] * 40, vocab_size=vocab_size)
    return {
        "run": {"dir": str(tmp_path / "run"), "steps": 1, "start_from": str(model), **run},
        "data": {"corpora": {"c": {"path": str(path)}}, "sequence_length": 8, "global_batch_size": 2},
    }


def test_the_model_is_that_of_the_folder(tmp_path, model):
    built = build_recipe(recipe(tmp_path, model))
    assert built.model.hidden_size == CONFIGS["llama"].hidden_size
    assert built.model.vocab_size == CONFIGS["llama"].vocab_size, "a corpus of fewer tokens changes nothing"
    assert built.model.max_position_embeddings == CONFIGS["llama"].max_position_embeddings
    assert built.run.start_hash == identity_of(model)
    assert config_of(recipe(tmp_path, model))[0].model == built.model, "without the corpora too"


@pytest.mark.parametrize(
    "content", [b"", b"\x09" + b"\0" * 7 + b"{}", (2**62).to_bytes(8, "little") + b"{}" * 9]
)
def test_a_file_whose_header_is_beyond_its_end_is_refused(tmp_path, model, content):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ModelError,
        match=r"is damaged: its header would have .* no safetensors file.*Download",
    ):
        identity_of(folder)


def test_a_model_section_beside_it_is_refused(tmp_path, model):
    with pytest.raises(ConfigError, match=r"start_from and \[model\] are both given.*Remove \[model\]"):
        build_recipe({**recipe(tmp_path, model), "model": {"preset": "llama3-8b"}})


def test_a_key_that_is_not_read_is_ignored_where_the_recipe_says_so(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "mup_scale": 0.5}))
    with pytest.raises(ModelError, match=r"does not read: mup_scale = 0\.5\. .*--ignore-key mup_scale"):
        build_recipe(recipe(tmp_path, folder))
    ignoring = {**recipe(tmp_path, folder), "model": {"ignored_keys": ["mup_scale", "of_another"]}}
    built = build_recipe(ignoring)
    assert built.model.ignored_keys == ("mup_scale",)
    assert config.build(type(built), config.dump(built)) == built
    assert config_of(ignoring)[0].model == built.model
    assert build_for_others(ignoring).model.ignored_keys == ("mup_scale", "of_another")
    with pytest.raises(ConfigError, match="must be a list of texts"):
        build_recipe({**ignoring, "model": {"ignored_keys": "mup_scale"}})
    del ignoring["run"]["start_from"]
    with pytest.raises(ConfigError, match=r"about the folder of run\.start_from, and there is none"):
        build_recipe(ignoring)


def test_rows_longer_than_the_models_context_are_refused(tmp_path, model):
    raw = recipe(tmp_path, model)
    raw["data"]["sequence_length"] = 129
    with pytest.raises(ConfigError, match=r"sequence_length 129 is above .* 128"):
        build_recipe(raw)


def test_token_ids_that_no_known_tokenizer_explains_are_refused(tmp_path, model):
    with pytest.raises(ConfigError, match=r"token ids up to 299, model\.vocab_size is 211.*--tokenizer"):
        build_recipe(recipe(tmp_path, model, vocab_size=300))


def test_a_known_tokenizer_with_more_tokens_grows_the_vocabulary(tmp_path, model):
    raw = recipe(tmp_path, model, vocab_size=300)
    folder = tmp_path / "corpus"
    save_manifest(folder, replace(load_manifest(folder), tokenizer="ab" * 32))
    assert build_recipe(raw).model.vocab_size == 320


@pytest.mark.parametrize("run", [{"start_step": 5}, {"start_hash": "ab"}])
def test_keys_of_a_start_need_a_start(tmp_path, model, run):
    raw = recipe(tmp_path, model, **run)
    del raw["run"]["start_from"]
    with pytest.raises(ConfigError, match=r"need run\.start_from"):
        build_recipe({**raw, "model": {"preset": "llama3.2-1b", "vocab_size": 100}})


def test_a_folder_of_other_weights_than_the_recipe_insists_on_is_refused(tmp_path, model):
    assert build_recipe(recipe(tmp_path, model, start_hash=identity_of(model)))
    with pytest.raises(
        ConfigError, match=f"not those that run.start_hash names: they are {identity_of(model)}"
    ):
        build_recipe(recipe(tmp_path, model, start_hash="00" * 16))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda _: None, ConfigError, "is no folder"),
        (lambda folder: folder.mkdir(), CheckpointError, "no complete checkpoint"),
        (
            lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{")),
            CheckpointError,
            "damaged",
        ),
        (
            lambda folder: (folder.mkdir(), (folder / "config.json").write_text('{"model_type": "gpt2"}')),
            ModelError,
            "family of models is not supported .*gpt2",
        ),
        (
            lambda folder: (folder.mkdir(), (folder / "adapter_config.json").write_text("{}")),
            ModelError,
            "is an adapter, and a model is needed. Merge it into its base with `penstock export .* --merge",
        ),
    ],
)
def test_a_folder_without_a_model_is_refused(tmp_path, make, error, said):
    make(tmp_path / "start")
    with pytest.raises(error, match=said):
        build_recipe(recipe(tmp_path, tmp_path / "start"))


def test_pickled_weights_are_refused_before_the_run(tmp_path, model):
    shutil.copytree(model, tmp_path / "start")
    (tmp_path / "start" / "model.safetensors").rename(tmp_path / "start" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only pickled weights"):
        build_recipe(recipe(tmp_path, tmp_path / "start"))


def without_head(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}


def without_a_norm(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}


def with_another_layer(tensors):
    return {**tensors, "model.layers.2.mlp.up_proj.weight": tensors["model.norm.weight"].clone()}


def narrower(tensors):
    return {**tensors, "model.layers.1.mlp.up_proj.bias": tensors["model.layers.1.mlp.up_proj.bias"][:-1]}


def quantised(tensors):
    return {name: tensor.char() if "q_proj.weight" in name else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_head, r"has no output matrix: .* set tie_word_embeddings to true"),
        (without_a_norm, r"missing: model\.norm\.weight"),
        (with_another_layer, r"unexpected: model\.layers\.2\.mlp\.up_proj\.weight"),
        (narrower, r"up_proj\.bias in .* has shape \(51,\), but config\.json makes it \(52,\)"),
        (quantised, r"q_proj\.weight in .* is quantised, and nothing says how \(got 'I8'\)"),
    ],
)
def test_weights_that_do_not_fit_their_config_are_refused_before_the_run(tmp_path, model, change, said):
    folder = shutil.copytree(model, tmp_path / "model")
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said):
        build_recipe(recipe(tmp_path, folder))


def test_a_truncated_file_is_refused_before_the_run(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "model")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1])
    said = rf"damaged: it has {len(content) - 1:,} bytes, and its header describes {len(content):,}"
    with pytest.raises(ModelError, match=said):
        build_recipe(recipe(tmp_path, folder))


def test_an_index_that_names_a_tensor_of_another_file_is_refused_before_the_run(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "model")
    names = [*load_file(folder / "model.safetensors"), "model.absent.weight"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"names model\.absent\.weight in model\.safetensors, which"):
        build_recipe(recipe(tmp_path, folder))


def test_the_identity_sees_config_headers_and_numbers_but_no_path(tmp_path, model):
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    (copy / "README.md").write_text("of no matter")
    assert identity_of(copy) == identity_of(model)
    tensors = load_file(copy / "model.safetensors")
    save_file(
        {n: t + 1e-3 for n, t in tensors.items()}, copy / "model.safetensors", metadata={"format": "pt"}
    )
    assert identity_of(copy) != identity_of(model)
    shutil.copy(model / "model.safetensors", copy)
    assert identity_of(copy) == identity_of(model)
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-3}))
    assert identity_of(copy) != identity_of(model)


def test_the_previous_starts_step_and_model_are_kept(tmp_path, model):
    raw = recipe(tmp_path, model)
    built = build_recipe(raw)
    kept = config.dump(built)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(kept))
    gone = tmp_path / "gone"
    kept["run"]["start_from"] = raw["run"]["start_from"] = str(gone)
    (tmp_path / "run" / "config.json").write_text(json.dumps(kept))
    again = build_recipe(raw)
    assert (again.model, again.run.start_hash) == (built.model, built.run.start_hash)
    with pytest.raises(ConfigError, match="is no folder"):
        build_recipe({**raw, "run": {**raw["run"], "start_from": str(tmp_path / "elsewhere")}})


def test_a_run_that_is_still_training_is_refused_with_a_remedy(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    with (base / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"still training.*penstock export .* --out FOLDER"):
            build_recipe(recipe(tmp_path, base))
        with pytest.raises(CheckpointError, match="no complete checkpoint of step 7"):
            build_recipe(recipe(tmp_path, base, start_step=7))
