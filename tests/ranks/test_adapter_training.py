"""Tuning with adapters equals peft + transformers, on every layout: same losses, same gradients.

The reference is a plain loop over peft's model (tests/peft_loop.py). Losses agree to 1e-5 of themselves, and
the gradient of each parameter to 1e-5 of its norm: float32 sums in another order, and nothing else. Here each
layout has one model, and slices and stages have both; check_adapter_training.py has both of all.
"""

from typing import Any

import pytest
import torch
from tests.peft_loop import folder_of, peft_loop, peft_names
from tests.rank_batches import RankBatches
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, Qwen3Config

from penstock.checkpoint.find import find
from penstock.checkpoint.open_model import open_model
from penstock.models import FAMILIES
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.live_engine import PlainTensors, fill_whole
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

# of PEFT, which asks transformers in its old words
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

VOCAB, STEPS = 48, 3
LOOKED_AT = 2
"""Step whose gradients are compared: those of A are zero in the first, and Adam enlarges rounding later."""
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
METHODS: dict[str, dict[str, Any]] = {
    "full": {"method": "full"},
    "lora": {"method": "lora", "rank": 4, "alpha": 6.0},
    "rslora": {"method": "rslora", "rank": 5, "alpha": 3.0, "layers": "attention"},
    "dora": {"method": "dora", "rank": 3, "alpha": 6.0},
    "int4": {"method": "lora", "rank": 2, "alpha": 4.0, "base": "int4"},
    "int8": {"method": "lora", "rank": 2, "alpha": 4.0, "base": "int8"},
    "int8 dora": {"method": "dora", "rank": 2, "alpha": 4.0, "base": "int8"},
    "head": {"method": "lora", "rank": 3, "alpha": 6.0, "layers": ("attention", "unembed")},
    "head dora": {"method": "dora", "rank": 3, "alpha": 6.0, "layers": ("all", "unembed")},
    "head int4": {"method": "lora", "rank": 3, "alpha": 6.0, "layers": ("mlp", "unembed"), "base": "int4"},
}
OF_PEFT = ("full", "lora", "rslora", "dora", "head", "head dora")
LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("lora", 2, {}),
    ("lora", 2, {"base_sharding": "sharded"}),
    ("dora", 3, {"base_sharding": "sharded"}),
    ("lora", 4, {"base_sharding": "sharded", "shard": 2, "replicate": 2}),
    ("dora", 2, {"tensor": 2}),
    ("dora", 4, {"tensor": 2, "base_sharding": "sharded"}),
    ("lora", 2, {"context": 2}),
    ("dora", 2, {"context": 2, "base_sharding": "sharded"}),
    ("dora", 2, {"pipeline": 2, "rows": 2}),
    ("lora", 4, {"pipeline": 2, "tensor": 2, "rows": 2}),
    ("rslora", 4, {"pipeline": 2, "rows": 1, "base_sharding": "sharded"}),
    ("head", 2, {"base_sharding": "sharded"}),
    ("head", 4, {"tensor": 2, "shard": 2}),
    ("head", 2, {"pipeline": 2, "rows": 2}),
    ("head dora", 2, {}),
    ("head dora", 2, {"tensor": 2}),
    ("head dora", 2, {"context": 2, "base_sharding": "sharded"}),
    ("full", 2, {}),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(1, VOCAB, (n % 40 + 1,), generator=generator).tolist() for n in range(300)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    return {
        "llama": folder_of(where / "llama", LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True)),
        "qwen3": folder_of(where / "qwen3", Qwen3Config(**SMALL, head_dim=8, tie_word_embeddings=True)),
    }


def families(method):
    """The other one's output matrix is the embedding."""
    return ("llama",) if method.startswith("head") else ("llama", "qwen3")


def recipe_of(
    corpus, folder, run, tune, *, steps=STEPS, rows=None, base_sharding=None, **parallel
) -> TrainConfig:
    if base_sharding is not None:
        tune = {**tune, "base_sharding": base_sharding}
    return build_recipe(
        {
            "run": {"dir": str(run), "steps": steps, "start_from": str(folder)},
            "tune": tune,
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 12,
                "micro_batch_size": rows,
            },
            "optim": {"learning_rate": 5e-3, "clip_norm": 0.5},
            "schedule": {"rule": "constant"},
            "checkpoint": {"keep": 9},
            "parallel": parallel,
            "compute": "float32",
        }
    )


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def learned(model) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters() if p.requires_grad}


def tuned(recipe, world, *, stop_at=None, looked_at=LOOKED_AT):
    """Return the first values of what is learned, the records, and the unclipped gradients of a step."""
    state = open_state(recipe, world)
    first, steps, gradients = learned(state.model), [0], {}

    def look(*_: object) -> None:
        steps[0] += 1
        if steps[0] == looked_at:
            gradients.update(
                {n: whole(p.grad) for n, p in state.model.named_parameters() if p.grad is not None}
            )

    state.optimizer.register_step_pre_hook(look)
    return first, records_of(state, recipe, world, stop_at=stop_at), gradients


class Layouts:
    """What runs of these methods, models, ranks and settings compute, on ranks that they share."""

    def __init__(self, cases, corpus, folders, run):
        self.recipes = {
            str(case): recipe_of(corpus, folders[case[1]], run / str(number), METHODS[case[0]], **case[3])
            for number, case in enumerate(cases)
        }
        ranks = {str(case): case[2] for case in cases}
        self._batches = RankBatches(ranks, lambda name, world: tuned(self.recipes[name], world))

    def of(self, *case):
        """Return what `tuned` returns on each rank."""
        return self._batches.of(str(case))


def references_of(cases, corpus, folders, run):
    """Return what one rank and peft compute for each method and model, from the first values of that rank."""
    alone = {(method, family): (method, family, 1, {}) for method, family in cases}
    layouts, found = Layouts([*alone.values()], corpus, folders, run), {}
    for case, layout in alone.items():
        (one,) = layouts.of(*layout)
        found[case] = *one, peft_loop(layouts.recipes[str(layout)], one[0], gradients_of=LOOKED_AT)
    return found


@pytest.fixture(scope="module")
def references(corpus, folders, tmp_path_factory):
    """What one rank and peft compute for each method and model."""
    cases = [(method, family) for method in OF_PEFT for family in families(method)]
    return references_of(cases, corpus, folders, tmp_path_factory.mktemp("references"))


def check(records, gradients, reference) -> None:
    losses, expected = reference
    assert [r["loss"] for r in records if "loss" in r] == pytest.approx(losses, rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        wanted = expected[name]
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm() + 1e-9, name


@pytest.mark.parametrize(
    ("method", "family"), [(method, family) for method in OF_PEFT for family in families(method)]
)
def test_one_process_computes_what_peft_does(references, method, family):
    _, records, gradients, reference = references[method, family]
    check(records, gradients, reference)


def with_models(layouts, both):
    """Return each layout with one model, in turn, and these methods with these settings with both."""
    found = []
    for number, (method, ranks, settings) in enumerate(layouts):
        of_method = families(method)
        if (method, settings) not in both:
            of_method = (of_method[number % len(of_method)],)
        found += [(method, family, ranks, settings) for family in of_method]
    return found


BOTH = [("dora", {"tensor": 2}), ("dora", {"pipeline": 2, "rows": 2})]


CASES = with_models(LAYOUTS, BOTH)


@pytest.fixture(scope="module")
def layouts(corpus, folders, tmp_path_factory):
    return Layouts(CASES, corpus, folders, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_computes_what_peft_does(layouts, references, case):
    compare(layouts, references, case)


def compare(layouts, references, case):
    """Hold the first values, gradients and losses of a layout against one process and peft."""
    results = layouts.of(*case)
    first, _, _, reference = references[case[:2]]
    begun = {name: value for values, _, _ in results for name, value in values.items()}
    assert begun.keys() == first.keys() == peft_names(layouts.recipes[str(case)]).keys()
    for name, value in begun.items():
        torch.testing.assert_close(value, first[name], rtol=1e-6, atol=0)
    gradients = {name: g for _, _, found in results for name, g in found.items()}
    check(results[0][1], gradients, reference)


def test_a_run_that_moves_to_other_ranks_goes_on_as_if_it_had_not(corpus, folders, references, tmp_path):
    """The checkpoints hold what is learned and its moments only; frozen weights are read again."""
    tune = METHODS["dora"]
    expected = [r["loss"] for r in references["dora", "llama"][1] if "loss" in r]
    losses, run = [], tmp_path / "run"
    for ranks, stop, settings in ((2, 1, {}), (1, 2, {}), (3, None, {"base_sharding": "sharded"})):
        recipe = recipe_of(corpus, folders["llama"], run, tune, **settings)
        results = on_ranks(lambda world, r=recipe, s=stop: tuned(r, world, stop_at=s), ranks=ranks)
        losses += [r["loss"] for r in results[0][1] if "loss" in r]
    assert losses == pytest.approx(expected, rel=1e-5)
    saved = find(run).index()
    assert saved.meta.adapter == recipe.adapter
    assert {name.rpartition(".")[2] for name in saved.tensors if name.startswith("model.")} == {
        "lora_a",
        "lora_b",
        "magnitude",
    }
    assert sum(name.startswith("optimizer.") for name in saved.tensors) > 0


LIVE = [
    ("dora", "llama", 2, {"base_sharding": "sharded"}),
    ("dora", "llama", 4, {"tensor": 2, "shard": 2}),
    ("lora", "llama", 2, {"pipeline": 2, "rows": 2}),
    ("int4", "llama", 2, {}),
    ("int8 dora", "llama", 2, {"tensor": 2}),
    ("head dora", "llama", 2, {"tensor": 2}),
    ("head", "llama", 2, {"pipeline": 2, "rows": 2}),
    ("head int4", "llama", 1, {}),
]


class LiveWeights:
    """The weights that runs of these methods, models, ranks and settings have after two steps, merged."""

    def __init__(self, cases, corpus, folders, run):
        self._recipes = {
            str((method, family, ranks, settings)): recipe_of(
                corpus, folders[family], run / str(number), METHODS[method], steps=2, **settings
            )
            for number, (method, family, ranks, settings) in enumerate(cases)
        }
        self._batches = RankBatches({str(case): case[2] for case in cases}, self._work)

    def _work(self, case, world):
        recipe = self._recipes[case]
        state = open_state(recipe, world)
        records_of(state, recipe, world)
        model = FAMILIES[recipe.model.model_type](recipe.model) if world.is_first else None
        fill_whole(model, state, recipe, world)
        return None if model is None else dict(model.named_parameters())

    def of(self, case):
        """Return the parameters on the first rank, and the model of the run's checkpoint."""
        found, *_ = self._batches.of(str(case))
        return found, open_model(self._recipes[str(case)].run.dir)[0]


@pytest.fixture(scope="module")
def live_weights(corpus, folders, tmp_path_factory):
    return LiveWeights(LIVE, corpus, folders, tmp_path_factory.mktemp("live"))


@pytest.mark.parametrize("case", LIVE, ids=str)
def test_the_live_weights_are_those_of_the_checkpoint_merged(live_weights, case):
    found, merged = live_weights.of(case)
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(found[name], parameter, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose layers two ranks can cut between groups of inputs that share a scale of 4 bits."""
    shape = {**SMALL, "hidden_size": 64, "intermediate_size": 128}
    return folder_of(tmp_path_factory.mktemp("wide") / "llama", LlamaConfig(**shape))


ALONE: dict[str, tuple[str, int, dict[str, Any]]] = {
    method: (method, 1, {}) for method in ("int8", "int8 dora", "int4")
}
SHARED: dict[str, tuple[str, int, dict[str, Any]]] = {
    f"{method}, {layout}": (method, 2, layout)
    for method in ALONE
    for layout in ({"tensor": 2}, {"pipeline": 2, "rows": 2}, {})
}


def rounded(recipe, world):
    """Return the matrices of the base, and the losses."""
    state = open_state(recipe, world)
    tensors = PlainTensors(state.model)
    names = [name for name in tensors if name.endswith(".weight") and ".a" in name]
    matrices = {n: whole(tensors[n]) for n in names}
    return matrices, [record["loss"] for record in records_of(state, recipe, world) if "loss" in record]


@pytest.fixture(scope="module")
def rounded_bases(corpus, wide, tmp_path_factory):
    """What each rank finds of a rounded base, by method and layout."""
    run = tmp_path_factory.mktemp("rounded")
    recipes = {
        name: recipe_of(corpus, wide, run / str(number), METHODS[method], **layout)
        for number, (name, (method, _, layout)) in enumerate((ALONE | SHARED).items())
    }
    ranks = {name: case[1] for name, case in (ALONE | SHARED).items()}
    return RankBatches(ranks, lambda name, world: rounded(recipes[name], world))


@pytest.mark.parametrize("case", SHARED)
def test_a_rounded_base_is_the_same_one_on_any_number_of_ranks(rounded_bases, case):
    """Matrices bit for bit. Losses differ by the rounding of tokens: a tensor-parallel rank rounds its part
    of their numbers by the largest one of that part."""
    ((alone, expected),) = rounded_bases.of(SHARED[case][0])
    results = rounded_bases.of(case)
    shared = {name: value for values, _ in results for name, value in values.items()}
    assert alone.keys() == shared.keys()
    for name, matrix in alone.items():
        assert torch.equal(shared[name], matrix), name
    assert results[0][1] == pytest.approx(expected, rel=2e-3)


def test_a_run_is_not_resumed_with_another_adapter(corpus, folders, tmp_path):
    recipe = recipe_of(corpus, folders["llama"], tmp_path / "run", METHODS["lora"], steps=1)
    on_ranks(lambda world: tuned(recipe, world)[1], ranks=1)
    other = recipe_of(corpus, folders["llama"], tmp_path / "run", METHODS["dora"])
    with pytest.raises(AssertionError, match="method was lora, is dora; rank was 4, is 3"):
        on_ranks(lambda world: tuned(other, world)[1], ranks=1)
