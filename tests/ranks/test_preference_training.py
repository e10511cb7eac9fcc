"""Preference losses in training: the same on any layout and after a resume, and a preference is learned.

Losses agree to 1e-5 of themselves: float32 sums in another order, and nothing else.
"""

import dataclasses
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from tests.peft_loop import folder_of
from tests.preferences import VOCAB, answers, pairs_corpus, recipe_of, thumbs_corpus
from tests.rank_batches import RankBatches
from transformers import LlamaConfig

from penstock.core.config import load_json
from penstock.core.errors import PassStopped
from penstock.parallel.config import EthernetConfig
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.setup import open_state
from penstock.train.tune import reference
from penstock.train.tune.preference import PreferencePairs
from penstock.train.tune.preference_loss import PAIR_LOSSES
from penstock.train.tune.preference_objective import PreferenceObjective

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
LOSSES = {
    "dpo": {"loss": "dpo", "beta": 0.3},
    "simpo": {"loss": "simpo", "beta": 2.0, "margin": 0.4},
    "kto": {"loss": "kto", "beta": 0.3, "undesirable_weight": 0.7},
}
LORA = {"method": "lora", "rank": 4, "alpha": 8.0}
COMPARED = (
    "loss",
    "grad_norm",
    "reward_margin",
    "log_prob_chosen",
    "kto_divergence",
    "validation_loss",
    "validation_reward_margin",
    "validation_kto_divergence",
)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    where = tmp_path_factory.mktemp("corpora")
    pairs, thumbs = pairs_corpus(where / "pairs", answers(120)), thumbs_corpus(where / "thumbs", answers(200))
    return {"dpo": pairs, "simpo": pairs, "kto": thumbs}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("model") / "m", LlamaConfig(**SMALL))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of each test's own."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "reference"


def trained(recipe, world, *, stop_at=None):
    torch.set_num_threads(1)
    return records_of(open_state(recipe, world), recipe, world, stop_at=stop_at)


def on_uneven_machines(world):
    """Return the world of three ranks on two machines, two on the first."""
    return dataclasses.replace(
        world, ranks=dataclasses.replace(world.ranks, local_rank=[0, 1, 0][world.ranks.rank])
    )


def compared(records):
    return [
        {name: r[name] for name in COMPARED if name in r}
        for r in records
        if "loss" in r or "validation_loss" in r
    ]


def check_alike(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-5)


Case = tuple[str, str, int, dict[str, Any]]
"""Loss, method, ranks, and options of `recipe_of`."""
ALONE: list[Case] = [
    (kind, method, 1, {})
    for kind in LOSSES
    for method in ("full", "lora")
    if (kind, method) != ("simpo", "lora")
]
LAYOUTS: list[Case] = [
    ("dpo", "full", 1, {"rows": 4}),
    ("dpo", "lora", 4, {"context": 2, "tensor": 2, "rows": 4}),
    ("dpo", "full", 2, {"pipeline": 2, "rows": 3}),
    ("simpo", "full", 2, {"rows": 3}),
    ("kto", "full", 2, {"context": 2}),
    ("kto", "lora", 4, {"pipeline": 2, "rows": 3}),
]
BREADTH_FIRST: Case = ("dpo", "full", 2, {"rows": 2})


def tune_of(kind, method):
    return LOSSES[kind] | (LORA if method == "lora" else {})


@pytest.fixture(scope="module")
def found(corpora, start, tmp_path_factory):
    """A function that returns what each rank of a case trains; each case has a cache of its own."""
    where, recipes = tmp_path_factory.mktemp("runs"), {}
    for number, case in enumerate([*ALONE, *LAYOUTS, BREADTH_FIRST]):
        kind, method, _, options = case
        recipe = recipe_of(corpora[kind], start, where / str(number), tune_of(kind, method), **options)
        if case is BREADTH_FIRST:
            recipe = dataclasses.replace(recipe, ethernet=EthernetConfig(schedule="breadth_first"))
        recipes[str(case)] = recipe

    def work(case, world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENSTOCK_CACHE", f"{recipes[case].run.dir}-cache")
            return compared(trained(recipes[case], world))

    batches = RankBatches({str(case): case[2] for case in [*ALONE, *LAYOUTS, BREADTH_FIRST]}, work)
    return lambda case: batches.of(str(case))


@pytest.fixture(scope="module")
def alone(found):
    """A function that returns the records of one process."""

    def of(kind, method):
        (records,) = found((kind, method, 1, {}))
        return records

    return of


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_losses_and_rewards_are_those_of_one_process(alone, found, case):
    for records in found(case):
        check_alike(records, alone(*case[:2]))


def test_breadth_first_micro_batches_have_the_same_losses(alone, found):
    for records in found(BREADTH_FIRST):
        check_alike(records, alone("dpo", "full"))


def test_the_first_loss_is_that_of_no_preference(alone):
    """The model is its own reference, and so is one with an adapter that adds zero."""
    for method in ("full", "lora"):
        first = alone("dpo", method)[0]
        assert first["loss"] == pytest.approx(0.6931472, abs=1e-6)
        assert first["reward_margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_references_are_computed_once_and_again_where_they_are_lost(
    alone, corpora, start, tmp_path, cache, kind
):
    """Stopped on 2 ranks, resumed on 1 with them, then on 3 of two machines without: the same curve."""
    recipe = recipe_of(corpora[kind], start, tmp_path / "run", LOSSES[kind])
    records = on_ranks(lambda world: trained(recipe, world, stop_at=2), ranks=2)[0]
    made = {file.name: file.stat().st_mtime_ns for file in cache.rglob("*")}
    assert made
    assert not [name for name in made if name.endswith((".partial", ".tmp"))]
    records += on_ranks(lambda world: trained(recipe, world, stop_at=3), ranks=1)[0]
    assert {file.name: file.stat().st_mtime_ns for file in cache.rglob("*")} == made
    for file in sorted(cache.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    records += on_ranks(lambda world: trained(recipe, on_uneven_machines(world)), ranks=3)[0]
    assert {file.name for file in cache.rglob("*")} == made.keys()
    steps = {r["step"]: r["loss"] for r in records if "loss" in r}
    expected = [each["loss"] for each in alone(kind, "full") if "loss" in each]
    assert [*steps.values()] == pytest.approx(expected, rel=1e-4)


def test_a_reference_pass_that_is_stopped_goes_on_where_it_was(corpora, start, tmp_path, cache, monkeypatch):
    """One rank is asked to stop, all do; there is no column until it is whole, and then it has each value."""
    monkeypatch.setattr(reference, "BLOCK_TOKENS", 300)
    recipe = recipe_of(corpora["dpo"], start, tmp_path / "run", LOSSES["dpo"])
    asked: list[int] = []

    def stopped(world, at):
        def stop_requested():
            asked.append(world.ranks.rank)
            return world.ranks.rank == 1 and len(asked) == at

        try:
            open_state(recipe, world, stop_requested=stop_requested)
        except PassStopped:
            return len(asked)
        return -len(asked)

    def blocks():
        return [load_json(file)["blocks"] for file in cache.rglob("progress.json")]

    def column():
        stored = b"".join(file.read_bytes() for file in sorted(cache.rglob("*.reference")))
        return np.frombuffer(stored, "<f4")

    assert on_ranks(lambda world: stopped(world, 2), ranks=2) == [2, 2]
    assert blocks() == [2]
    assert not list(cache.rglob("columns.json"))
    left = -on_ranks(lambda world: stopped(world, 0), ranks=1)[0]
    assert not blocks()
    interrupted = column()
    shutil.rmtree(cache)
    assert -on_ranks(lambda world: stopped(world, 0), ranks=1)[0] == left + 2
    assert interrupted == pytest.approx(column(), rel=1e-5)


@pytest.fixture(scope="module")
def accuracies(start, tmp_path_factory):
    """Held-out accuracy of each method before and after, where one token's ending is preferred.

    Of two answers that a model finds equally good.
    """
    where = tmp_path_factory.mktemp("stated")
    pairs = [(prompt, [*answer[:2], 7], [*answer[:2], 8]) for prompt, answer, _ in answers(300, seed=1)]
    corpus = pairs_corpus(where / "c", pairs)
    dpo = {"loss": "dpo", "beta": 0.1}
    recipes = {
        method: recipe_of(corpus, start, where / method, dpo | more, steps=24, batch=8, rate=1e-2)
        for method, more in (("full", {}), ("lora", LORA))
    }

    def work(method, world):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PENSTOCK_CACHE", str(where / "cache"))
            return preferred(recipes[method], world)

    return RankBatches(dict.fromkeys(recipes, 1), work)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_stated_preference_moves_from_a_half_to_nine_tenths(accuracies, method):
    ((before, after),) = accuracies.of(method)
    assert 0.3 < before < 0.7
    assert after > 0.9


def preferred(recipe, world):
    """Return the share of held-out pairs whose chosen answer is the likelier one, before and after."""
    torch.set_num_threads(1)
    state = open_state(recipe, world)
    pairs = PreferencePairs(PAIR_LOSSES["simpo"], 1.0, 0.0, has_reference=False)
    likelier = PreferenceObjective(pairs)
    before = likelier.validate(state, world, rows=8)
    records_of(state, recipe, world)
    after = likelier.validate(state, world, rows=8)
    return [found["validation_reward_accuracy"] for found in (before, after)]
