"""Adapters that Penstock tuned, through real peft and back, merged, and served; what is refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.peft_loop import folder_of
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.checkpoint.adapter_run import open_with_adapter
from penstock.checkpoint.hf import load_pretrained
from penstock.checkpoint.peft import read_adapter, read_settings
from penstock.cli.main import main
from penstock.core.errors import CheckpointError, ModelError
from penstock.engine.assemble import build_engine
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.batch import StepBatch
from penstock.engine.model_runner.lora import Adapters
from penstock.engine.model_runner.open import identity_of_model, open_model
from penstock.engine.model_runner.serving_layers import prepare
from penstock.engine.request import Request
from penstock.models.decoder.tensor_slices import TensorParallelRank
from penstock.nn.linear.lora import Adapter, RoundedProduct, rounded_by_block
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

# of PEFT, which asks transformers in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

VOCAB = 48
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
IDS = torch.tensor([[5, 9, 3, 11, 7, 44, 40, 21, 30]])
METHODS = {
    "lora": {"method": "lora", "rank": 4, "alpha": 6.5},
    "rslora": {"method": "rslora", "rank": 5, "alpha": 3, "layers": ["query", "down"]},
    "dora": {"method": "dora", "rank": 3, "alpha": 6, "layers": "mlp"},
    "int4": {"method": "lora", "rank": 4, "alpha": 8, "base": "int4"},
    "dora-int8": {"method": "dora", "rank": 3, "alpha": 6, "base": "int8"},
    "head": {"method": "lora", "rank": 4, "alpha": 8, "layers": ["all", "unembed"]},
}
FROZEN_OUTPUT = "base_model.model.lm_head.base_layer.weight"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    documents = [[1 + (i * j) % 47 for j in range(1 + i % 50)] for i in range(300)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("models") / "base", LlamaConfig(**SMALL, mlp_bias=True))


def recipe_of(corpus, base, run, tune):
    return build_recipe(
        {
            "run": {"dir": str(run), "steps": 3, "start_from": str(base)},
            "tune": tune,
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 8,
            },
            "optim": {"learning_rate": 2e-2},
            "schedule": {"rule": "constant"},
            "compute": "float32",
        }
    )


def tuned(recipe, world, of="logits", ids=IDS):
    """Train, or go on after the end; return the logits of the network as it is trained, and the adapter."""
    state = open_state(recipe, world)
    records_of(state, recipe, world)
    with torch.no_grad():
        logits = state.model(ids) if of == "logits" else state.model.hidden(ids)
    return logits, {n: p.detach() for n, p in state.model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def runs(corpus, base, tmp_path_factory):
    """A tuned run of each method: recipe, logits as trained, and adapter."""
    found = {}
    for name, tune in METHODS.items():
        recipe = recipe_of(corpus, base, tmp_path_factory.mktemp(name) / "run", tune)
        ((logits, adapter),) = on_ranks(lambda world, r=recipe: tuned(r, world), ranks=1)
        found[name] = recipe, logits, adapter
    return found


def exported(recipe, folder, *options):
    assert main(["export", recipe.run.dir, "--out", str(folder), *options]) == 0
    return folder


@torch.no_grad()
def logits_of(model):
    out = model(IDS)
    return getattr(out, "logits", out)


def close(one, other):
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`")
@pytest.mark.parametrize("method", ["lora", "rslora", "dora", "head"])
def test_peft_computes_what_was_trained_and_writes_the_same_bits(runs, base, tmp_path, method):
    recipe, logits, adapter = runs[method]
    ours = exported(recipe, tmp_path / "ours")
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), ours
    ).eval()
    close(logits_of(theirs), logits)
    theirs.save_pretrained(tmp_path / "theirs")
    before, after = (load_file(f / "adapter_model.safetensors") for f in (ours, tmp_path / "theirs"))
    assert after.keys() - before.keys() == ({FROZEN_OUTPUT} if method == "head" else set())
    assert all(torch.equal(before[name], after[name]) for name in before)
    read = read_adapter(tmp_path / "theirs", recipe.model)
    for name, tensor in adapter.items():
        layer, _, part = name.rpartition(".")
        assert torch.equal(getattr(read[layer], {"lora_a": "a", "lora_b": "b"}.get(part, part)), tensor)
        assert read[layer].scale == pytest.approx(recipe.adapter.scale)


@pytest.mark.parametrize("method", METHODS)
def test_the_merged_model_computes_what_was_trained(runs, tmp_path, method):
    recipe, logits, _ = runs[method]
    merged = exported(recipe, tmp_path / "merged", "--merge", "--dtype", "fp32")
    found = logits_of(AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32))
    if recipe.tune.base == "compute":
        close(found, logits)
    else:  # while tuning and serving, tokens are rounded too
        assert (found - logits).norm() < 0.05 * logits.norm()
    model, _ = open_model(Path(recipe.run.dir))
    close(logits_of(model), found)


def test_an_adapter_folder_is_merged_into_the_base_that_it_names_or_is_given(runs, base, tmp_path):
    recipe, logits, _ = runs["dora"]
    folder = exported(recipe, tmp_path / "adapter")
    model, _ = open_with_adapter(folder)
    close(logits_of(model), logits)
    copied = tmp_path / "copy"
    shutil.copytree(base, copied)
    arguments = ["export", str(folder), "--merge", "--base", str(copied), "--out", str(tmp_path / "m")]
    assert main([*arguments, "--dtype", "fp32"]) == 0
    close(logits_of(load_pretrained(tmp_path / "m")), logits)


def test_a_slice_of_a_tuned_model_is_that_of_the_merged_one(runs):
    recipe, _, _ = runs["dora"]
    where = Path(recipe.run.dir)
    whole, _ = open_model(where)
    part, _ = open_model(where, place=TensorParallelRank(1, 2))
    assert torch.equal(part.layers[0].mlp.down.weight, whole.layers[0].mlp.down.weight[:, 48:])
    assert torch.equal(part.layers[1].mlp.up.weight, whole.layers[1].mlp.up.weight[48:])


@torch.no_grad()
@pytest.mark.parametrize("method", ["int4", "dora-int8"])
def test_the_model_that_was_tuned_in_few_bits_is_the_one_that_is_served(runs, base, tmp_path, method):
    """Block by block the same numbers; then the engine rounds its output matrix too, to 8 bits."""
    recipe, logits, _ = runs[method]
    served = load_pretrained(base)
    adapters = Adapters(served, served.config, base_hash=identity_of_model(base))
    adapters.add("a", exported(recipe, tmp_path / "adapter"))
    prepare(served, recipe.tune.base)
    adapters.begin(step_of(adapters.indexes["a"]))
    ((hidden, _),) = on_ranks(lambda world: tuned(recipe, world, of="hidden"), ranks=1)
    close(served.hidden(IDS), hidden)
    found = served.logits(served.hidden(IDS))
    assert (found - logits).norm() < 0.01 * logits.norm()
    adapters.begin(step_of(-1))
    assert (served.hidden(IDS) - hidden).norm() > 0.05 * hidden.norm()


def step_of(adapter):
    """Return a step of IDS with an adapter, as far as `Adapters.begin` reads it."""
    rest = dict.fromkeys(
        ("token_ids", "positions", "slots", "lengths", "block_tables", "logit_rows"), np.zeros(0)
    )
    starts = np.array([0, IDS.shape[1]], np.int32)
    return StepBatch(**rest, query_starts=starts, adapters=np.array([adapter], np.int32))


@pytest.mark.parametrize("method", ["lora", "dora", "head"])
def test_a_server_reads_what_a_run_has_just_written(runs, base, tmp_path, method):
    recipe, logits, _ = runs[method]
    folder = exported(recipe, tmp_path / "adapter")
    engine = build_engine(base, EngineConfig(device="cpu", cache_gib=2**-8, adapters={"a": folder}))
    try:
        request = Request(prompt=tuple(IDS[0].tolist()), max_tokens=1, adapter="a")
        engine.add(request)
        (piece,) = engine.step()
        assert piece.token_ids == (int(logits[0, -1].argmax()),)
    finally:
        engine.close()


def test_an_adapter_for_other_weights_of_the_same_shape_is_refused(runs, tmp_path):
    recipe, _, _ = runs["lora"]
    folder = exported(recipe, tmp_path / "adapter")
    other = folder_of(tmp_path / "other", LlamaConfig(**SMALL, mlp_bias=True), seed=2)
    options = EngineConfig(device="cpu", cache_gib=2**-8, adapters={"a": folder})
    with pytest.raises(ModelError, match=r"was trained on other weights \(\w{16}\) than those of this model"):
        build_engine(other, options)
    with pytest.raises(ModelError, match="was trained on other weights"):
        open_with_adapter(folder, base=other)


def test_a_run_in_place_of_its_adapter_is_refused_with_the_command(runs):
    recipe, _, _ = runs["lora"]
    run = Path(recipe.run.dir)
    for folder in (run, next((run / "checkpoints").iterdir())):
        with pytest.raises(
            ModelError, match=f"Write its adapter with `penstock export {folder} --out FOLDER`"
        ):
            read_settings(folder)


def test_an_adapter_in_place_of_a_model_is_refused_with_the_command(runs, corpus, tmp_path):
    recipe, _, _ = runs["lora"]
    folder = exported(recipe, tmp_path / "adapter")
    said = rf"is an adapter, and a model is needed\. Merge it into its base .* {folder} --merge"
    with pytest.raises(ModelError, match=said):
        build_engine(folder, EngineConfig(device="cpu", cache_gib=2**-8))
    with pytest.raises(ModelError, match=said):
        recipe_of(corpus, folder, tmp_path / "next", METHODS["lora"])
    with pytest.raises(
        CheckpointError, match=rf"has an adapter only.* penstock export {recipe.run.dir} --merge"
    ):
        recipe_of(corpus, recipe.run.dir, tmp_path / "next", METHODS["lora"])


def test_a_run_whose_base_is_gone_or_changed_is_not_opened(corpus, tmp_path):
    base = folder_of(tmp_path / "base", LlamaConfig(**SMALL))
    recipe = recipe_of(corpus, base, tmp_path / "run", METHODS["lora"])
    on_ranks(lambda world: tuned(recipe, world)[0], ranks=1)
    base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"is no folder any more\. Put it back"):
        open_model(tmp_path / "run")
    folder_of(base, LlamaConfig(**SMALL), seed=2)
    with pytest.raises(CheckpointError, match="is an adapter for other weights than those that are in"):
        open_model(tmp_path / "run")
    other = recipe_of(corpus, tmp_path / "moved", tmp_path / "next", METHODS["lora"])
    assert exported(other_run(recipe, other), tmp_path / "adapter")  # it needs no base


def other_run(recipe, other):
    """Return a recipe whose folder is that of a run that ended."""
    assert recipe.run.start_hash == other.run.start_hash
    return recipe


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["RUN", "--dtype", "bf16"], "An adapter is written in the dtype in which it was trained"),
        (["RUN", "--base", "x"], "--base is for an adapter's folder"),
        (["BASE", "--merge"], "--merge is for adapters, and this is a model"),
        (["ADAPTER"], "This is an adapter's folder already"),
        (["NOWHERE", "--merge"], "NOWHERE is not a folder"),
        (["NOWHERE", "--base", "x"], "NOWHERE is not a folder"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(runs, base, tmp_path, capsys, options, said):
    recipe, _, _ = runs["lora"]
    if "ADAPTER" in options:
        exported(recipe, tmp_path / "adapter")
    places = {"RUN": recipe.run.dir, "BASE": str(base), "ADAPTER": str(tmp_path / "adapter")}
    given = [places.get(option, option) for option in options]
    assert main(["export", *given, "--out", str(tmp_path / "out")]) == 2
    assert said in capsys.readouterr().err


def codes_of(recipe, world):
    state = open_state(recipe, world)
    return {
        name: product.layer.matrix()
        for block in rounded_by_block(state.model)
        for name, product in block.items()
    }


@pytest.mark.parametrize("rounded", ["int8", "int4"])
def test_a_base_is_rounded_from_the_numbers_that_it_stores_whatever_computes(corpus, base, tmp_path, rounded):
    """As merging and serving do: from those in bfloat16 some codes would be others."""
    tune = {"method": "lora", "rank": 2, "base": rounded}
    recipe = dataclasses.replace(recipe_of(corpus, base, tmp_path / "run", tune), compute="bfloat16")
    (found,) = on_ranks(lambda world: codes_of(recipe, world), ranks=1)
    stored = open_model(base)[0].state_dict()
    assert len(found) == 7 * SMALL["num_hidden_layers"]
    for name, matrix in found.items():
        product = RoundedProduct(stored[name], rounded)
        product.fill(stored[name])
        assert torch.equal(matrix, product.layer.matrix()), name


@pytest.mark.filterwarnings("error")
def test_a_row_of_zeros_of_a_base_stays_one_when_dora_is_merged():
    weight = torch.randn(4, 6)
    weight[2] = 0
    lengths = torch.linalg.vector_norm(weight, dim=1)
    merged = Adapter(torch.randn(2, 6), torch.zeros(4, 2), 1.0, lengths).change(weight)
    close(merged, weight)


def test_a_base_that_an_adapter_names_by_no_text_is_refused(runs, tmp_path):
    folder = exported(runs["lora"][0], tmp_path / "adapter")
    settings = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": 5}))
    with pytest.raises(ModelError, match=r"names a base model that is no folder here \(got 5\)"):
        open_with_adapter(folder)
