"""Held-out scores over gloo ranks against one process: the same rows, corpus by corpus."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.data.corpus.manifest import load_manifest, save_manifest
from penstock.parallel.layout import ParallelConfig, layout_of
from penstock.parallel.mesh import make_mesh
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.text.tokenizer import train_tokenizer
from penstock.train.data_setup import heldout_rows
from penstock.train.evaluate import heldout_scores
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import build_model

TEXT = "the penstock feeds the turbine, für den es gebaut wurde " * 4


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    tokenizer = train_tokenizer([TEXT] * 3, vocab_size=280)
    for name, step in (("prose", 3), ("noise", 7)):
        documents = [tokenizer.encode(TEXT[start:]) for start in range(0, 200, step)] * 4
        write_corpus(folder / name, documents, vocab_size=280)
    tokenizer.save(folder / "prose" / "tokenizer.json")
    manifest = load_manifest(folder / "prose")
    save_manifest(folder / "prose", replace(manifest, tokenizer=tokenizer.fingerprint))
    return build_recipe(
        {
            "run": {"dir": str(folder / "run"), "steps": 5},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "data": {
                "corpora": {
                    "prose": {"path": str(folder / "prose"), "weight": 2.0},
                    "noise": {"path": str(folder / "noise"), "weight": 1.0},
                },
                "sequence_length": 24,
                "global_batch_size": 4,
                "holdout": 0.3,
            },
            "validate": {"every": 5, "samples": 13},
            "compute": "float32",
        }
    )


def scores(recipe, world):
    mesh = make_mesh(world, layout_of(recipe.parallel, world_size=world.ranks.world_size))
    model, _ = build_model(recipe, world, mesh)
    heldout = heldout_rows(recipe)
    found = heldout_scores(model, heldout, world, mesh, rows=2)
    return {name: (score.nats, score.tokens, score.text_bytes) for name, score in found.items()}, heldout.rows


@pytest.fixture(scope="module")
def alone(recipe):
    ((found, rows),) = on_ranks(lambda world: scores(recipe, world), ranks=1)
    assert rows == 13
    assert set(found) == {"prose", "noise"}
    assert all(tokens > 0 and size > tokens for _, tokens, size in found.values())
    return found


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (3, {}),
        (2, {"tensor": 2}),
        (2, {"context": 2}),
        (2, {"pipeline": 2}),
        (4, {"replicate": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_scores_on_several_ranks_are_those_of_one_process(recipe, alone, ranks, axes):
    """13 rows, two at a time: some passes are padded with rows that must not count, and ranks that work on
    the same rows count them once."""
    spread = replace(recipe, parallel=ParallelConfig(**axes))
    for found, _ in on_ranks(lambda world: scores(spread, world), ranks=ranks):
        for name, (nats, tokens, size) in alone.items():
            assert found[name][1:] == (tokens, size)
            np.testing.assert_allclose(found[name][0], nats, rtol=1e-6)
