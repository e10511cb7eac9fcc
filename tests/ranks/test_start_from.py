"""Training from the weights of a folder: the same model on every layout, each rank reading only its part."""

import shutil
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.rank_batches import RankBatches
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from penstock.checkpoint import load_start as load_start_module
from penstock.checkpoint.hf import load_pretrained
from penstock.checkpoint.hf_folder import identity_of
from penstock.checkpoint.open_model import open_model
from penstock.core.errors import CheckpointError, ModelError
from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.data_setup import train_loader
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state, write_identity

VOCAB, STEPS = 48, 2
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
Case = tuple[str, int, dict[str, Any]]
"""Start folder, ranks, and the section `[parallel]` of a recipe."""
LAYOUTS: list[Case] = [
    ("llama", 2, {}),
    ("llama", 3, {}),
    ("llama", 4, {"shard": 2, "replicate": 2}),
    ("llama", 2, {"offload": True}),
    ("llama", 4, {"tensor": 2}),
    ("llama", 4, {"tensor": 4, "shard": 1}),
    ("llama", 2, {"context": 2}),
    ("llama", 2, {"pipeline": 2, "rows": 2}),
    ("llama", 4, {"pipeline": 2, "tensor": 2, "rows": 2}),
    ("tied", 3, {}),
    ("tied", 4, {"tensor": 2}),
    ("tied", 4, {"pipeline": 2, "tensor": 2, "rows": 2}),
]
GROWN: list[Case] = [
    ("tied", 1, {}),
    ("llama", 3, {}),
    ("llama", 4, {"tensor": 2}),
    ("tied", 4, {"tensor": 2}),
    ("llama", 2, {"pipeline": 2, "rows": 2}),
    ("tied", 2, {"pipeline": 2, "rows": 2}),
]
"""Of a corpus with more tokens than the models have."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, VOCAB, (20,), generator=generator).tolist() for _ in range(200)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of transformers: one of several files, one tied; and what the library says of them."""
    where, found = tmp_path_factory.mktemp("models"), {}
    for name, config in {
        "llama": LlamaConfig(**SMALL),
        "tied": Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True),
    }.items():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(where / name, max_shard_size="20KB" if name == "llama" else "1GB")
        found[name] = where / name
    return found


def recipe_of(corpus, folder, run, *, rows=None, steps=STEPS, sections=None, **parallel) -> TrainConfig:
    return build_recipe(
        {
            "run": {"dir": str(run), "steps": steps, "start_from": str(folder)},
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 12,
                "micro_batch_size": rows,
            },
            "schedule": {"rule": "constant"},
            "parallel": parallel,
            "compute": "float32",
            **(sections or {}),
        }
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(recipe, world, *, stop_at=None):
    """Return the weights at the start, the share of the stored numbers this rank read, and the losses."""
    read = []
    with pytest.MonkeyPatch.context() as patch:
        plain = load_start_module._read_box

        def count(file, name, box):
            read.append(box.num_elements)
            return plain(file, name, box)

        patch.setattr(load_start_module, "_read_box", count)
        state = open_state(recipe, world)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in state.model.parameters())
    first = {name: whole(p) for name, p in state.model.named_parameters()}
    losses = [r["loss"] for r in records_of(state, recipe, world, stop_at=stop_at) if "loss" in r]
    return first, (sum(read), held), losses


def loss_of_transformers(folder, recipe) -> float:
    """Return the loss of the first step, each row without its neighbours' documents, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    loader = train_loader(recipe, rank=0, world_size=1, deliver="torch")
    batch = loader.gather(loader.samples_of(0))
    ids, ends, total = batch["input_ids"].flatten(), batch["cu_seqlens"].tolist(), 0.0
    with torch.no_grad():
        for start, end in pairwise(ends):
            if end > start:
                logits = model(ids[None, start:end]).logits[0]
                total += functional.cross_entropy(
                    logits, batch["labels"].flatten()[start:end], reduction="sum"
                ).item()
    return total / int((batch["labels"] >= 0).sum())


@pytest.fixture(scope="module")
def alone(corpus, folders, tmp_path_factory):
    """Weights at the start and losses of one rank, by folder; the first loss is that of transformers."""
    found = {}
    for name, folder in folders.items():
        recipe = recipe_of(corpus, folder, tmp_path_factory.mktemp("alone") / "run")
        ((weights, (read, held), losses),) = on_ranks(lambda world, r=recipe: trained(r, world), ranks=1)
        assert read == held
        assert losses[0] == pytest.approx(loss_of_transformers(folder, recipe), rel=1e-5)
        found[name] = weights, losses
    return found


def in_batches(cases, corpus, folders, run):
    """Return the recipe of each case, and what its ranks find."""
    recipes = {
        str(case): recipe_of(corpus, folders[case[0]], run / str(number), **case[2])
        for number, case in enumerate(cases)
    }
    ranks = {str(case): case[1] for case in cases}
    return recipes, RankBatches(ranks, lambda name, world: trained(recipes[name], world))


@pytest.fixture(scope="module")
def layouts(corpus, folders, tmp_path_factory):
    return in_batches(LAYOUTS, corpus, folders, tmp_path_factory.mktemp("layouts"))[1]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_starts_from_the_same_weights(layouts, alone, case):
    weights, losses = alone[case[0]]
    for found, (read, held), seen in layouts.of(str(case)):
        assert read == held
        assert all(torch.equal(found[key], weights[key]) for key in found)
        assert seen == pytest.approx(losses, rel=1e-5)


MORE = 70
"""Token ids of a corpus with more of them than the models have."""


@pytest.fixture(scope="module")
def larger_corpus(tmp_path_factory):
    """A corpus whose manifest names its tokenizer, so that a vocabulary grows for it."""
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, MORE, (20,), generator=generator).tolist() for _ in range(200)]
    folder = write_corpus(tmp_path_factory.mktemp("larger"), documents, vocab_size=MORE)
    save_manifest(folder, replace(load_manifest(folder), tokenizer="ab" * 32))
    return folder


@pytest.fixture(scope="module")
def grown(larger_corpus, folders, tmp_path_factory):
    return in_batches(GROWN, larger_corpus, folders, tmp_path_factory.mktemp("grown"))


@pytest.mark.parametrize("case", GROWN, ids=str)
def test_new_tokens_get_the_mean_of_the_old_rows(grown, folders, case):
    (recipes, batches), name = grown, case[0]
    recipe = recipes[str(case)]
    assert recipe.model.vocab_size == 128  # 70, rounded up to a multiple of 64
    model = AutoModelForCausalLM.from_pretrained(folders[name], dtype=torch.float32)
    torch.manual_seed(0)
    model.resize_token_embeddings(MORE, pad_to_multiple_of=64, mean_resizing=True)
    expected = {"embed.weight": model.get_input_embeddings().weight}
    if name == "llama":
        expected["unembed.weight"] = model.get_output_embeddings().weight
    seen = set()
    for weights, _, _ in batches.of(str(case)):
        for key in expected.keys() & weights.keys():
            seen.add(key)
            assert torch.equal(weights[key][:VOCAB], expected[key][:VOCAB])
            mean = expected[key][:VOCAB].double().mean(dim=0).float()
            assert all(torch.equal(row, mean) for row in weights[key][VOCAB:])
            # transformers draws around the mean, with a billionth of the rows' covariance
            assert (weights[key] - expected[key]).abs().max() < 1e-4
    assert seen == expected.keys()


@pytest.mark.parametrize("weights", ["bfloat16_master", "bfloat16_stochastic"])
def test_a_float32_copy_has_the_numbers_of_the_folder_and_not_rounded_ones(
    corpus, folders, tmp_path, weights
):
    sections = {"precision": {"weights": weights}}
    recipe = recipe_of(corpus, folders["llama"], tmp_path / "run", sections=sections)

    def work(world):
        state = open_state(recipe, world)
        return {
            name: (whole(p), {k: whole(v) for k, v in state.optimizer.state[p].items() if k == "master"})
            for name, p in state.model.named_parameters()
        }

    plain = load_pretrained(folders["llama"]).state_dict()
    for found in on_ranks(work, ranks=2):
        for name, (parameter, states) in found.items():
            assert torch.equal(parameter, plain[name].bfloat16())
            assert all(torch.equal(master, plain[name]) for master in states.values())
            assert bool(states) == (weights == "bfloat16_master")


def test_islands_start_from_the_same_weights(corpus, folders, tmp_path):
    sections = {"outer": {"every": 2}}
    recipe = recipe_of(corpus, folders["llama"], tmp_path / "run", sections=sections, shard=1, replicate=2)

    def work(world):
        state = open_state(recipe, world)
        return {name: whole(value) for name, value in state.outer.values.items()}

    plain = load_pretrained(folders["llama"]).state_dict()
    for found in on_ranks(work, ranks=2):
        assert all(torch.equal(value, plain[name]) for name, value in found.items())


def test_a_killed_run_resumes_on_other_layouts_without_its_start(corpus, folders, tmp_path):
    start = tmp_path / "start"
    shutil.copytree(folders["llama"], start)
    whole_run = recipe_of(corpus, start, tmp_path / "whole", steps=3)
    ((_, _, losses),) = on_ranks(lambda world: trained(whole_run, world), ranks=1)
    first = recipe_of(corpus, start, tmp_path / "run", steps=3)

    def begin(world):
        found = trained(first, world, stop_at=1)
        if world.is_first:
            write_identity(first, open_state(first, world).loader)
        return found

    seen = on_ranks(begin, ranks=1)[0][2]
    shutil.rmtree(start)  # a run's own checkpoints are all that it needs
    second = recipe_of(corpus, start, tmp_path / "run", steps=3, tensor=2)
    seen += on_ranks(lambda world: trained(second, world, stop_at=2), ranks=4)[0][2]
    third = recipe_of(corpus, start, tmp_path / "run", steps=3)
    seen += on_ranks(lambda world: trained(third, world), ranks=3)[0][2]
    assert seen == pytest.approx(losses, rel=1e-5)


def test_a_resume_with_another_start_is_refused_with_both(corpus, folders, tmp_path):
    recipe = recipe_of(corpus, folders["llama"], tmp_path / "run")
    on_ranks(lambda world: trained(recipe, world, stop_at=1), ranks=1)
    other = tmp_path / "other"
    shutil.copytree(folders["llama"], other)
    path = min(other.glob("*.safetensors"))
    tensors = load_file(path)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    changed = recipe_of(corpus, other, tmp_path / "run")

    def refused(world):
        with pytest.raises(CheckpointError) as caught:
            open_state(changed, world)
        return str(caught.value)

    (said,) = on_ranks(refused, ranks=1)
    for start in (recipe, changed):
        assert start.run.start_from in said
        assert start.run.start_hash[:16] in said
    assert "choose another run.dir" in said


def test_a_copy_of_the_folder_is_the_same_start(corpus, folders, tmp_path):
    recipe = recipe_of(corpus, folders["llama"], tmp_path / "run")
    on_ranks(lambda world: trained(recipe, world, stop_at=1), ranks=1)
    shutil.copytree(folders["llama"], tmp_path / "copy")
    moved = recipe_of(corpus, tmp_path / "copy", tmp_path / "run")
    assert len(on_ranks(lambda world: trained(moved, world)[2], ranks=1)[0]) == STEPS - 1


def test_a_run_starts_from_the_checkpoint_of_another_of_any_layout(corpus, folders, tmp_path):
    base = recipe_of(corpus, folders["llama"], tmp_path / "base", tensor=2)
    on_ranks(lambda world: trained(base, world), ranks=4)
    model, _ = open_model(tmp_path / "base")
    recipe = recipe_of(corpus, tmp_path / "base", tmp_path / "run")
    assert recipe.run.start_step == STEPS
    for weights, _, _ in on_ranks(lambda world: trained(recipe, world), ranks=3):
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("damage", ["missing", "shape", "quantised"])
def test_weights_that_cannot_be_read_end_the_run_on_every_rank(corpus, folders, tmp_path, damage):
    start = tmp_path / "start"
    shutil.copytree(folders["tied"], start)
    recipe = recipe_of(corpus, start, tmp_path / "run", pipeline=2, rows=2)
    path = start / "model.safetensors"
    tensors = load_file(path)
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "shape":
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)
    else:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path, metadata={"format": "pt"})
    recipe = replace(recipe, run=replace(recipe.run, start_hash=identity_of(start)))

    def refused(world):
        with pytest.raises((ModelError, CheckpointError), match=r"model\.") as caught:
            open_state(recipe, world)
        return str(caught.value)

    said = {"missing": "missing: model.norm.weight", "shape": "47, 32", "quantised": "is quantised"}[damage]
    assert all(said in message for message in on_ranks(refused, ranks=2))
