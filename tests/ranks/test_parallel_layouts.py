"""Every layout against a plain torch loop in one process: same losses, same gradients.

The reference knows nothing of Penstock's trainer, optimizer or parallelisms: the network, a loader of all
rows, torch's cross entropy, clipping and AdamW. Losses agree to 1e-5 of themselves over 2 steps and on the
held-out rows after them, and the gradient of each parameter to 1e-6 of its norm: float32 sums in another
order, and nothing else. (A key's bias moves no softmax but by rotation: its gradient is what is left of sums
a thousand times larger.)

Each axis and each pair of axes is in a layout here; check_parallel_layouts.py has more of them.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.families import mixed
from tests.rank_batches import RankBatches, import_compiler
from torch.distributed.tensor import DTensor
from torch.nn import functional

from penstock.core import config
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.obs.meter import StepMeter
from penstock.parallel import tensor
from penstock.parallel.tensor import slice_blocks
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.train.data_setup import heldout_rows, train_loader
from penstock.train.loop import train
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

VOCAB, STEPS = 48, 2
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents whose next token mostly follows from the last, so that 2 steps learn something."""
    generator = torch.Generator().manual_seed(0)
    documents = []
    for length in torch.randint(1, 60, (400,), generator=generator).tolist():
        surprises = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
        is_surprise = (torch.rand(length, generator=generator) < 0.2).tolist()
        document = surprises[:1]
        for surprise, surprised in zip(surprises[1:], is_surprise[1:], strict=True):
            document.append(surprise if surprised else document[-1] * 5 % (VOCAB - 1) + 1)
        documents.append(document)
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


def recipe_of(corpus, folder, *, model=LLAMA, steps=STEPS, rows=None, **parallel) -> TrainConfig:
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": steps},
            "model": model,
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": 8,
                "micro_batch_size": rows,
                "holdout": 0.1,
            },
            "optim": {"learning_rate": 5e-3, "clip_norm": 0.5},
            "schedule": {"rule": "constant"},
            "validate": {"every": 100, "samples": 5},
            "parallel": parallel,
            "compute": "float32",
        }
    )


def recipe_of_parts(recipe: TrainConfig, *parts: str) -> TrainConfig:
    """Return the recipe of a network whose layers have these parts, in turn; of the same network without."""
    return replace(recipe, model=mixed(recipe.model, *parts)) if parts else recipe


def plain_loop(recipe: TrainConfig) -> tuple[list[float], dict[str, torch.Tensor], float]:
    """Return the losses of all steps, the gradients of the first, before clipping, and the held-out loss."""
    model = Decoder(recipe.model)
    model.limit_texts(recipe.data.longest)
    init_weights(model, seed=recipe.run.seed)
    optim = recipe.optim
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=optim.learning_rate,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
    )
    losses, first = [], {}
    loader = train_loader(recipe, rank=0, world_size=1, deliver="torch")
    batches = iter(loader)
    for batch in batches:
        loss = mean_loss(model, batch)
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
        if len(losses) == recipe.run.steps:
            break
    batches.close()
    heldout = heldout_rows(recipe)
    with torch.no_grad():
        heldout_loss = mean_loss(model, heldout.loader.gather(np.arange(heldout.rows))).item()
    return losses, first, heldout_loss


def mean_loss(model: Decoder, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], cu_seqlens=batch["cu_seqlens"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def trained(recipe: TrainConfig, world) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the records of a run, and the gradients of its first step, before clipping."""
    records, first = [], {}
    state = open_state(recipe, world)

    def keep(*_) -> None:
        if not first:
            first.update({name: whole(p.grad) for name, p in state.model.named_parameters()})

    state.optimizer.register_step_pre_hook(keep)
    train(
        state,
        recipe,
        world,
        meter=StepMeter(flops_per_token=lambda _: 1, peak_flops=1),
        stop_requested=lambda: False,
        sinks=[records.append],
        on_batch=lambda *_: None,
    )
    return records, first


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    """What the plain loop finds, by model and steps, computed once each."""
    found: dict[str, Any] = {}

    def of(model: dict[str, Any], steps: int = STEPS, *, parts: tuple[str, ...] = ()):
        if (key := str((model, steps, parts))) not in found:
            recipe = recipe_of(corpus, tmp_path_factory.mktemp("plain"), model=model, steps=steps)
            recipe = recipe_of_parts(recipe, *parts)
            found[key] = plain_loop(recipe)
        return found[key]

    return of


def assert_equal(results, expected) -> None:
    losses, gradients, heldout = expected
    assert losses[-1] < 0.999 * losses[0], "it learns 100 times the tolerance: a wrong gradient shows"
    assert {name for _, found in results for name in found} == gradients.keys()
    for records, found in results:
        assert_gradients_equal(records, found, gradients)
        steps = [record["loss"] for record in records if "loss" in record]
        assert steps == pytest.approx(losses, rel=1e-5)
        (validation,) = [record["validation_loss"] for record in records if "validation_loss" in record]
        assert validation == pytest.approx(heldout, rel=1e-5)


def assert_gradients_equal(records, found, gradients) -> None:
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
    assert records[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert found.keys() <= gradients.keys()
    for name, gradient in found.items():
        difference = (gradient - gradients[name]).double().norm()
        own = gradients[name].double().norm()
        assert difference <= 1e-6 * (own + 1e-3 * norm), name


FAMILIES = {
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
    "granite_swa": {
        "model_type": "granite_swa",
        "attention_multiplier": 0.2,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"],
        "layer_rope_theta": [0.0, 10_000.0],
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3": {
        "model_type": "phi3",
        "max_position_embeddings": 64,  # rows of 24 are within the original context
        "rope_scaling": {
            "rope_type": "longrope",
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "short_factor": [1.0, 1.2, 1.4, 1.6],
            "long_factor": [4.0, 5.0, 6.0, 7.0],
        },
    },
    "smollm3": {"model_type": "smollm3", "layer_rope_theta": [0.0, 10_000.0]},
    "hunyuan": {"model_type": "hunyuan_v1_dense"},
    "ministral3": {
        "model_type": "ministral3",
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 6.0,
            "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "olmo2": {"model_type": "olmo2"},
    "glm4": {"model_type": "glm4", "attention_bias": True, "partial_rotary_factor": 0.5},
    "gemma": {"model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "attn_logit_softcapping": 0.1,
        "final_logit_softcapping": 0.3,
    },
    "arcee": {"model_type": "arcee", "mlp_bias": True},
}


def deep(family: str, layers: int = 4) -> dict[str, Any]:
    """Return a model of a family with more layers than two, what its layers differ in repeated."""
    of_layers = {
        key: values * (layers // len(values))
        for key, values in FAMILIES[family].items()
        if key in ("layer_types", "layer_rope_theta")
    }
    return LLAMA | FAMILIES[family] | of_layers | {"num_hidden_layers": layers}


Case = tuple[int, dict[str, Any], dict[str, Any]]
"""Ranks, model, and the section `[parallel]` of a recipe."""
LAYOUTS: dict[str, Case] = {
    f"{ranks} ranks, {parallel}": (ranks, LLAMA, parallel)
    for ranks, parallel in [
        (2, {}),
        (4, {"shard": 2, "replicate": 2}),
        (2, {"shard": 1, "replicate": 2}),
        (2, {"reshard_after_forward": False}),
        (4, {"reshard_after_forward": 2}),
        (2, {"offload": True}),
        (4, {"tensor": 2}),
        (2, {"context": 2}),
        (2, {"context": 2, "context_rule": "ulysses"}),
        (4, {"context": 2}),
        (4, {"tensor": 2, "shard": 1, "replicate": 2}),
        (4, {"context": 2, "shard": 1, "replicate": 2, "context_rule": "ulysses"}),
        (2, {"pipeline": 2, "rows": 2}),
        (4, {"pipeline": 2, "rows": 1}),
    ]
}
CUT: dict[str, Case] = {
    f"{family} cut": (2, LLAMA | model, {"tensor": 2}) for family, model in FAMILIES.items()
}
SHARED_HEADS: dict[str, Case] = {
    "biases, 2 heads": (4, LLAMA | {"num_key_value_heads": 2, "attention_bias": True}, {"tensor": 4}),
    "qwen3, 1 head": (
        4,
        LLAMA | FAMILIES["qwen3"] | {"num_key_value_heads": 1},
        {"tensor": 2, "context": 2},
    ),
    "olmo2, 2 heads": (4, LLAMA | FAMILIES["olmo2"], {"tensor": 4}),
    "granite_swa, 2 heads": (
        4,
        LLAMA | FAMILIES["granite_swa"],
        {"tensor": 2, "context": 2, "context_rule": "ulysses"},
    ),
}
STRETCHES: dict[str, Case] = {
    f"{family}, {rule}": (4, LLAMA | FAMILIES[family], {"context": 4, "context_rule": rule})
    for family in ("granite_swa", "gemma2")
    for rule in ("all_gather", "ulysses")
}
TWO_STRETCHES: dict[str, Case] = {
    f"two stretches of mistral, {rule}": (
        2,
        LLAMA | FAMILIES["mistral"],
        {"context": 2, "context_rule": rule},
    )
    for rule in ("all_gather", "ulysses")
}
STAGES: dict[str, Case] = {
    f"{family}, {stages} stages": (stages, deep(family), {"pipeline": stages, "rows": 2})
    for family, stages in (("granite", 3), ("mistral", 2), ("gemma", 2), ("gemma2", 2), ("granite_swa", 2))
}
POSITIONS: dict[str, Case] = {
    f"stages of {family}, {rule}": (
        4,
        deep(family) | bases,
        {"pipeline": 2, "context": 2, "rows": 4, "context_rule": rule},
    )
    for family, rule, bases in (
        ("smollm3", "all_gather", {"layer_rope_theta": [10_000.0, 0.0, 10_000.0, 0.0]}),
        ("smollm3", "ulysses", {"layer_rope_theta": [10_000.0, 0.0, 10_000.0, 0.0]}),
        ("ministral3", "ulysses", {}),
    )
}
TIED: dict[str, Case] = {
    f"tied, {parallel}": (ranks, deep("tied"), parallel)
    for ranks, parallel in [
        (2, {"pipeline": 2, "stages_per_rank": 2, "rows": 2}),
        (4, {"pipeline": 2, "tensor": 2, "offload": True, "rows": 2}),
        (4, {"pipeline": 2, "replicate": 2, "shard": 1, "rows": 1}),
    ]
}
IN_TURN: dict[str, Case] = {
    f"5 layers, {parallel}": (
        ranks,
        LLAMA | {"num_hidden_layers": 5},
        {**parallel, "stages_per_rank": 2, "rows": 2},
    )
    for ranks, parallel in [(2, {"pipeline": 2}), (4, {"pipeline": 2, "context": 2})]
}
PARTS = ("both", "attention", "mlp", "both")
MIXED = {
    "granite_swa": FAMILIES["granite_swa"]
    | {
        "num_hidden_layers": 4,
        "layer_types": 2 * ["full_attention", "sliding_attention"],
        "layer_rope_theta": [10_000.0, 0.0, 0.0, 500.0],
    },
    "gemma2": FAMILIES["gemma2"]
    | {"num_hidden_layers": 4, "layer_types": 2 * FAMILIES["gemma2"]["layer_types"]},
}
"""Networks of PARTS: windows, sinks or softcaps, rotary rules and none differ between their attentions."""


def of_parts(*layouts: tuple[str, int, dict[str, Any]]) -> dict[str, Case]:
    """Return a case for each layout of a network of PARTS."""
    return {
        f"{family} of parts, {ranks} ranks, {parallel}": (ranks, LLAMA | MIXED[family], parallel)
        for family, ranks, parallel in layouts
    }


OF_PARTS = of_parts(
    ("granite_swa", 2, {}),
    ("granite_swa", 2, {"tensor": 2}),
    ("granite_swa", 4, {"context": 4}),
    ("granite_swa", 4, {"pipeline": 4, "rows": 2}),  # a stage without attention
)
SETTINGS = {"optim.rule=muon": 1e-5, "recompute.policy=full": 1e-5, "compute=bfloat16": 1e-3}
"""Settings with the tolerance of the losses: bfloat16 rounds sums of another order otherwise."""
ONE_RANK: dict[str, Case] = {f"{setting}, one rank": (1, LLAMA, {}) for setting in SETTINGS}
COMPOSED: dict[str, Case] = {
    setting: (4, LLAMA, {"pipeline": 2, "tensor": 2, "rows": 2}) for setting in SETTINGS
}
OF_PLAIN_LOOP = (
    LAYOUTS | CUT | SHARED_HEADS | STRETCHES | TWO_STRETCHES | STAGES | POSITIONS | TIED | IN_TURN | OF_PARTS
)


def batches_of(cases: dict[str, Case], corpus, folder) -> RankBatches[Any]:
    """What each rank of a case trains."""

    def recipe(name: str) -> TrainConfig:
        _, model, parallel = cases[name]
        found = recipe_of(corpus, folder / str([*cases].index(name)), model=model, **parallel)
        if " of parts" in name:
            return recipe_of_parts(found, *PARTS)
        settings = [setting for setting in SETTINGS if name.startswith(setting)]
        return build_recipe(config.override(config.dump(found), settings)) if settings else found

    recipes = {name: recipe(name) for name in cases}
    return RankBatches(
        {name: case[0] for name, case in cases.items()}, lambda name, world: trained(recipes[name], world)
    )


@pytest.fixture(scope="module")
def batches(corpus, tmp_path_factory):
    return batches_of(OF_PLAIN_LOOP | ONE_RANK | COMPOSED, corpus, tmp_path_factory.mktemp("layouts"))


@pytest.fixture
def check(batches, plain):
    """A function that holds a case against the plain loop."""
    return lambda name: assert_equal(batches.of(name), plain(OF_PLAIN_LOOP[name][1]))


@pytest.mark.parametrize("case", LAYOUTS)
def test_losses_and_gradients_equal_those_of_the_plain_loop(check, case):
    check(case)


@pytest.mark.parametrize("case", CUT)
def test_every_family_is_cut_over_ranks_without_changing_what_it_learns(check, case):
    check(case)


@pytest.mark.parametrize("case", SHARED_HEADS)
def test_ranks_beyond_the_key_value_heads_share_them(check, case):
    check(case)


@pytest.mark.parametrize("case", STRETCHES)
def test_windows_sinks_and_softcaps_reach_across_the_edges_of_stretches(check, case):
    check(case)


@pytest.mark.parametrize("case", TWO_STRETCHES)
def test_two_stretches_keep_windows(check, case):
    check(case)


@pytest.mark.parametrize("case", OF_PARTS)
def test_layers_of_different_kinds_learn_over_ranks_as_on_one(batches, plain, case):
    assert_equal(batches.of(case), plain(OF_PARTS[case][1], parts=PARTS))


@pytest.mark.parametrize("case", STAGES)
def test_stages_keep_multipliers_windows_and_tied_matrices(check, case):
    check(case)


@pytest.mark.parametrize("case", POSITIONS)
def test_stages_and_stretches_keep_what_depends_on_positions(check, case):
    check(case)


@pytest.mark.parametrize("case", TIED)
def test_the_first_and_the_last_stage_keep_a_tied_matrix_equal(check, case):
    check(case)


@pytest.mark.parametrize("case", IN_TURN)
def test_several_stages_a_rank_take_turns(check, case):
    check(case)


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
def test_blocks_cut_over_ranks_compile_whole_and_learn_the_same(corpus, tmp_path, plain, monkeypatch):
    """torch's own collectives hand out tensors still under way; compiled, their gradients were lost."""

    def compiled(model, mesh):
        slice_blocks(model, mesh)
        for block in model.layers:
            block.compile(fullgraph=True, backend="aot_eager")

    import_compiler()
    monkeypatch.setattr(tensor, "slice_blocks", compiled)
    model = LLAMA | {"num_key_value_heads": 1, "num_hidden_layers": 1}  # each block is compiled by itself
    recipe = recipe_of(corpus, tmp_path, model=model, steps=1, tensor=2)
    recipe = replace(recipe, validate=replace(recipe.validate, every=0))
    losses, gradients, _ = plain(model)
    for records, found in on_ranks(lambda world: trained(recipe, world), ranks=2):
        assert [record["loss"] for record in records if "loss" in record] == pytest.approx(
            losses[:1], rel=1e-5
        )
        assert_gradients_equal(records, found, gradients)


@pytest.mark.parametrize("setting", COMPOSED)
def test_layouts_compose_with_optimizers_recomputation_and_precision(batches, setting):
    """Stages x slices against one rank."""
    ((one, _),), ((four, _), *_) = batches.of(f"{setting}, one rank"), batches.of(setting)
    expected, found = ([r["loss"] for r in records if "loss" in r] for records in (one, four))
    assert expected
    assert found == pytest.approx(expected, rel=SETTINGS[setting])


def test_a_run_resumes_in_another_layout(corpus, tmp_path, plain):
    """On shards x slices, stages, copies and one rank in turn: the losses of the plain loop throughout."""
    layouts = [
        (1, 4, {"tensor": 2}),
        (2, 2, {"pipeline": 2, "stages_per_rank": 2, "rows": 4}),
        (3, 2, {"shard": 1, "replicate": 2}),
        (4, 1, {}),
    ]
    resume(corpus, tmp_path, plain, layouts)


def resume(corpus, folder, plain, layouts):
    """Train to the steps of each layout in turn, and hold all losses against the plain loop's."""
    model, losses = LLAMA | FAMILIES["tied"] | {"num_hidden_layers": 5}, []
    for steps, ranks, parallel in layouts:
        recipe = recipe_of(corpus, folder, model=model, steps=steps, **parallel)
        ((records, _), *_) = on_ranks(lambda world, recipe=recipe: trained(recipe, world), ranks=ranks)
        losses += [record["loss"] for record in records if "loss" in record]
    assert losses == pytest.approx(plain(model, layouts[-1][0])[0], rel=1e-5)
