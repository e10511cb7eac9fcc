"""Training from the weights of a folder: the same model on every layout, each rank reading only its part."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from penstock.checkpoint import load_start as load_start_module
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.data_setup import train_loader
from penstock.train.recipe.config import TrainConfig
from penstock.train.recipe.load import build_recipe
from penstock.train.setup import open_state

VOCAB, STEPS = 48, 4
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
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {}),
    (3, {}),
    (4, {"shard": 2, "replicate": 2}),
    (2, {"offload": True}),
    (4, {"tensor": 2}),
    (4, {"tensor": 4, "shard": 1}),
    (2, {"context": 2}),
    (2, {"pipeline": 2, "rows": 2}),
    (4, {"pipeline": 2, "tensor": 2, "rows": 2}),
]


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
        plain = load_start_module.check_dtype

        def count(folder, name, tensor):
            read.append(tensor.numel())
            plain(folder, name, tensor)

        patch.setattr(load_start_module, "check_dtype", count)
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


@pytest.mark.parametrize("name", ["llama", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS, ids=str)
def test_every_layout_starts_from_the_same_weights(corpus, folders, tmp_path, name, ranks, layout):
    recipe = recipe_of(corpus, folders[name], tmp_path / "run", **layout)
    plain = recipe_of(corpus, folders[name], tmp_path / "plain")
    ((weights, _, losses),) = on_ranks(lambda world: trained(plain, world), ranks=1)
    for found, (read, held), seen in on_ranks(lambda world: trained(recipe, world), ranks=ranks):
        assert read == held
        assert all(torch.equal(found[key], weights[key]) for key in found)
        assert seen == pytest.approx(losses, rel=1e-5)
    assert losses[0] == pytest.approx(loss_of_transformers(folders[name], plain), rel=1e-5)
