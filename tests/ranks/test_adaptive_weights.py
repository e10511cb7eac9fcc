"""A mixture that follows the losses: exact sums, the same weights on all ranks, an exact resume."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from penstock.data.types import IGNORED_LABEL
from penstock.parallel.config import EthernetConfig
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state
from penstock.train.step import ControlFlags, train_step

VOCAB = 50


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """One corpus that is quickly learnt, one that cannot be."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randint(1, VOCAB, (40,), generator=generator).tolist() for _ in range(300)]
    easy = [[1 + (start + i) % 3 for i in range(40)] for start in range(300)]
    folder = tmp_path_factory.mktemp("corpora")
    return {
        name: write_corpus(folder / name, documents, vocab_size=VOCAB)
        for name, documents in (("easy", easy), ("noise", noise))
    }


def recipe_of(corpora, folder, **adaptive):
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 12},
            "model": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
            },
            "data": {
                "corpora": {name: {"path": str(path), "weight": 1} for name, path in corpora.items()},
                "sequence_length": 24,
                "global_batch_size": 12,
                "micro_batch_size": 2,
                "adaptive": {"policy": "online_data_mixing", "every": 4, **adaptive},
            },
            "optim": {"learning_rate": 1e-2},
            "checkpoint": {"every": 100},
            "compute": "float32",
        }
    )


def trained(recipe, world, *stops):
    """Train with stops after so many steps; return all records and the mixtures of the loader."""
    torch.set_num_threads(1)
    records = []
    for stop_at in (*stops, 99):
        state = open_state(recipe, world)
        records += records_of(state, recipe, world, stop_at=stop_at)
    kept = [(r["step"], r["loss"], r["corpus_weights"]) for r in records if "loss" in r]
    return kept, state.loader.mixtures, state.adaptive.state_dict()


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(1, "depth_first"), (2, "depth_first"), (1, "breadth_first"), (2, "breadth_first")],
)
def test_the_losses_of_a_step_by_corpus_are_those_of_float64(corpora, tmp_path, ranks, schedule):
    """1e-6 relative: each token's loss is a float32, their sums are float64."""
    recipe = dataclasses.replace(recipe_of(corpora, tmp_path), ethernet=EthernetConfig(schedule=schedule))

    def both(world):
        state = open_state(recipe, world)
        whole = state.loader.gather(state.loader.samples_of(0))
        hidden = []
        state.model.double()
        with torch.no_grad():
            state.model(
                whole["input_ids"],
                position_ids=whole["position_ids"],
                cu_seqlens=whole["cu_seqlens"],
                finish=lambda states, project: hidden.append(project(states)),
            )
        state = open_state(recipe, world)
        result = train_step(
            state,
            next(iter(state.loader)),
            world,
            micro_batch_size=2,
            clip_norm=1.0,
            asked=ControlFlags(stop=False),
        )
        labels, names = whole["labels"], state.loader.corpora_of(whole["sample_ids"].numpy())
        each = functional.cross_entropy(
            hidden[0].flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
        ).view_as(labels)
        sums = [each[torch.from_numpy(names == i)].sum().item() for i in (0, 1)]
        counts = [(labels[torch.from_numpy(names == i)] != IGNORED_LABEL).sum().item() for i in (0, 1)]
        return result, sums, counts

    found = on_ranks(both, ranks=ranks)
    for result, sums, counts in found:
        assert result.corpus_labels == tuple(counts)
        assert result.corpus_sums == pytest.approx(sums, rel=1e-6)
        assert sum(result.corpus_sums) / sum(counts) == pytest.approx(result.loss, rel=1e-5)
    assert len({each.corpus_sums for each, _, _ in found}) == 1, "the same bits on every rank"


def test_all_ranks_take_the_same_mixtures_and_train_more_on_what_is_not_learnt(corpora, tmp_path):
    recipe = recipe_of(corpora, tmp_path, options={"smoothing": 0.0})
    one, two = on_ranks(lambda world: trained(recipe, world), ranks=2)
    assert one == two
    _, mixtures, _ = one
    assert [(step, reason) for step, _, reason in mixtures][1:] == [
        (8, "online_data_mixing"),
        (12, "online_data_mixing"),
    ]
    assert mixtures[-1][1]["noise"] > 0.5


@pytest.mark.parametrize("stops", [(3,), (2, 8)])
def test_a_run_stopped_between_decisions_and_resumed_decides_the_same(corpora, tmp_path, stops):
    recipe = recipe_of(corpora, tmp_path / "stopped", options={"smoothing": 0.5})
    whole = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, dir=str(tmp_path / "whole")))
    stopped = on_ranks(lambda world: trained(recipe, world, *stops), ranks=2)
    assert stopped == on_ranks(lambda world: trained(whole, world), ranks=2), "every digit of every step"


def test_following_the_losses_does_not_change_a_step(corpora, tmp_path):
    """The loss is summed in another order, which is all: 1e-6."""
    off = recipe_of(corpora, tmp_path / "off", policy="none")
    on = recipe_of(corpora, tmp_path / "on", every=100)

    def losses(recipe):
        def work(world):
            torch.set_num_threads(1)
            records = records_of(open_state(recipe, world), recipe, world)
            return [record["loss"] for record in records if "loss" in record]

        return on_ranks(work, ranks=1)[0]

    assert losses(on) == pytest.approx(losses(off), rel=1e-6)
