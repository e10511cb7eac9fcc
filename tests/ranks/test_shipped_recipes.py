"""The large recipes that come with Penstock, every setting but the sizes, on four gloo ranks."""

import math
import tomllib

import pytest
import torch

from penstock.core.config import override
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.resolve.load import build_recipe, recipe_names, recipe_text
from penstock.train.setup import open_state

LARGE = [name for name in recipe_names() if not name.startswith(("first", "tiny", "tune"))]
SMALL = {
    "run.steps": 2,
    "model.vocab_size": 96,
    "model.hidden_size": 32,
    "model.intermediate_size": 48,
    "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 2,
    "model.head_dim": 8,
    "data.sequence_length": 32,
    "data.global_batch_size": 8,
    "data.micro_batch_size": 1,
    "data.holdout": 0.3,
    "validate.samples": 8,
    "compile.enabled": False,  # takes longer than all the rest; see test_recompute_and_compile.py
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 60, (200,), generator=generator).tolist()
    documents = [torch.randint(1, 96, (n,), generator=generator).tolist() for n in lengths]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=96)


def small(name, corpus, folder):
    """Return a recipe with its degrees cut to 2, its model and its rows made small."""
    raw = tomllib.loads(recipe_text(name))
    values = dict(SMALL) | {"run.dir": str(folder)}
    values |= {f"data.corpora.{corpus_name}.path": str(corpus) for corpus_name in raw["data"]["corpora"]}
    for axis, degree in raw.get("parallel", {}).items():
        values[f"parallel.{axis}"] = 2 if isinstance(degree, int) and degree > 1 else degree
    settings = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
    ]
    return build_recipe(override(raw, settings))


@pytest.mark.parametrize("name", LARGE)
def test_a_large_recipe_made_small_trains_and_validates_on_four_ranks(name, corpus, tmp_path):
    recipe = small(name, corpus, tmp_path)
    records = on_ranks(lambda world: records_of(open_state(recipe, world), recipe, world), ranks=4)[0]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(math.log(96), abs=0.1), "uniform at the start"
    (validation,) = (record for record in records if "validation_loss" in record)
    assert set(validation["corpus_validation_loss"]) == set(recipe.data.corpora)
    assert all(math.isfinite(loss) for loss in validation["corpus_validation_loss"].values())
