"""Every lever of the `[ethernet]` section, alone and with the others, against FSDP2 as it comes.

A reduction read too early gives a wrong loss and no NaN, so each setting trains: several micro-batches a
step, clipping, validation and checkpoints in between. Losses agree to 1e-6 of themselves, and so do the
gradients of the first step: float32 sums in another order, and nothing else. check_ethernet.py has
more levers for each layout.
"""

import math
import os
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from tests.rank_batches import RankBatches, import_compiler

from penstock.core import config as configs
from penstock.nn.dtensor import detached_local
from penstock.parallel import apply
from penstock.parallel.apply import compile_blocks
from penstock.parallel.ethernet import async_collectives, reductions
from penstock.parallel.ethernet.scheduler import Ethernet
from penstock.parallel.flight_recorder import TrafficMeter
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.testing.training import records_of
from penstock.train.monitors.step_monitors import StepMonitors
from penstock.train.recipe.config import TrainConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

VOCAB, STEPS, MICRO_BATCHES = 48, 2, 3
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TWO_BLOCKS = MODEL | {"num_hidden_layers": 2}
INF = math.inf
LEVERS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "window": {"window_mib": 0.001},
    "no window": {"window_mib": INF},
    "keep": {"overlap": False, "keep_mib": INF},
    "operations": {"operations": 3},
    "some kept": {"keep_mib": 0.3, "window_mib": 0.001},
    "all": {"keep_mib": INF, "operations": 2},
    "breadth first": {"schedule": "breadth_first"},
    "breadth first, waiting": {"schedule": "breadth_first", "overlap": False},
    "breadth first, all": {"schedule": "breadth_first", "keep_mib": INF, "operations": 2},
    "breadth first, some kept": {"schedule": "breadth_first", "keep_mib": 0.1, "window_mib": 0.001},
}
DEPTH_FIRST, BREADTH_FIRST = ("all",), ("breadth first, all",)
BOTH = DEPTH_FIRST + BREADTH_FIRST
OTHERS = ("overlap", "some kept", "breadth first")
LAYOUTS: list[tuple[int, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    (4, {"parallel": {"hierarchy": "hybrid"}}, BOTH, ("overlap", "keep", "some kept")),
    (2, {"parallel": {"shard": 1, "replicate": 2}}, ("all", "breadth first"), ("overlap",)),
    (4, {"parallel": {"hierarchy": "hpz"}}, BREADTH_FIRST, DEPTH_FIRST + OTHERS),
    (2, {"parallel": {"reshard_after_forward": False}}, DEPTH_FIRST, BREADTH_FIRST + OTHERS),
    (2, {"parallel": {"offload": True}}, BREADTH_FIRST, DEPTH_FIRST + OTHERS),
    (4, {"parallel": {"tensor": 2}, "model": TWO_BLOCKS}, BOTH, OTHERS),
    (
        4,
        {"parallel": {"context": 2, "shard": 1, "replicate": 2}, "model": TWO_BLOCKS},
        BREADTH_FIRST,
        DEPTH_FIRST + OTHERS,
    ),
    (4, {"parallel": {"pipeline": 2}, "model": MODEL}, ("operations",), ("window", "overlap")),
    (8, {"parallel": {"pipeline": 2, "hierarchy": "hybrid"}}, (), ("overlap",)),
    (
        2,
        {"compile": {"enabled": True}, "validate": {"every": 0}, "model": TWO_BLOCKS},
        BREADTH_FIRST,
        DEPTH_FIRST,
    ),
    (
        2,
        {"recompute": {"policy": "full"}, "model": TWO_BLOCKS | {"tie_word_embeddings": True}},
        DEPTH_FIRST,
        BREADTH_FIRST + OTHERS,
    ),
]
"""Ranks, sections of the recipe, levers here, and levers of check_ethernet.py."""
HERE = [
    (ranks, {"model": TWO_BLOCKS, **sections}, levers) for ranks, sections, levers, _ in LAYOUTS if levers
]
"""In blocks as few as keep, free and reduce in turn; check_ethernet.py has four where a layout names none."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (200,), generator=generator).tolist()
    documents = [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def on_two_ranks(corpus, tmp_path_factory):
    """What each of two ranks finds with every lever, its shards gathered and freed as FSDP2 does it."""
    recipe = recipe_of(corpus, tmp_path_factory.mktemp("levers"), rows=2)
    return on_ranks(lambda world: compared(recipe, tuple(LEVERS), world), ranks=2)


def batches_of(layouts, corpus, folder) -> RankBatches[dict[str, Any]]:
    """What each rank of a layout finds with its levers; a layout is ranks, sections and levers."""
    cases = {str(layout): (number, *layout) for number, layout in enumerate(layouts)}

    def work(case: str, world) -> dict[str, Any]:
        number, ranks, sections, levers = cases[case]
        rows = max(1, 12 * sections.get("parallel", {}).get("tensor", 1) // ranks // MICRO_BATCHES)
        with pytest.MonkeyPatch.context() as patch:
            # compiled blocks run their traced operators one by one, which rounds as plain ones do
            patch.setattr(apply, "compile_blocks", partial(compile_blocks, backend="aot_eager"))
            return compared(recipe_of(corpus, folder / str(number), rows=rows, **sections), levers, world)

    return RankBatches({case: layout[1] for case, layout in cases.items()}, work)


@pytest.fixture(scope="module")
def in_layouts(corpus, tmp_path_factory):
    import_compiler()
    return batches_of(HERE, corpus, tmp_path_factory.mktemp("layouts"))


def recipe_of(corpus, folder, *, rows=1, **sections) -> TrainConfig:
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": STEPS},
            "model": MODEL,
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 16,
                "global_batch_size": 12,
                "micro_batch_size": rows,
                "holdout": 0.1,
            },
            "optim": {"learning_rate": 5e-3, "clip_norm": 0.5},
            "schedule": {"rule": "constant"},
            "validate": {"every": 1, "samples": 5},
            "checkpoint": {"every": 1},
            "compute": "float32",
            **sections,
        }
    )


def spoil(state, *, step: int) -> None:
    """Let one number of a gradient inside the model be infinite in a step."""

    def watch(_module, _inputs, output) -> None:
        if state.step == step and output.requires_grad:
            output.register_hook(lambda gradient: gradient.index_fill(-1, torch.tensor(0), INF))

    state.model.layers[1].mlp.register_forward_hook(watch)


def trained(recipe: TrainConfig, world, *, spoiled: int | None = None) -> dict[str, Any]:
    """Return the losses of a run, and this rank's gradients as the optimizer sees them.

    Args:
        spoiled: a step in which the last rank's gradients are not finite.
    """
    gradients: list[dict[str, torch.Tensor]] = []
    state = open_state(recipe, world)

    def keep(*_) -> None:
        gradients.append({name: detached_local(p.grad).clone() for name, p in state.model.named_parameters()})

    state.optimizer.register_step_pre_hook(keep)
    if spoiled is not None and world.ranks.rank == world.ranks.world_size - 1:
        spoil(state, step=spoiled)
    state.watch = StepMonitors(traffic=TrafficMeter(state.mesh))
    records = records_of(state, recipe, world)
    losses = [r[name] for r in records for name in ("loss", "validation_loss") if name in r]
    (traffic,) = (record["sent_bytes"] for record in records if record.get("event") == "traffic")
    most = state.ethernet.ledger.most if isinstance(state.ethernet, Ethernet) else 0  # nothing is gathered
    sizes = {name: 4 * p.numel() for name, p in state.model.named_parameters()}
    sent = traffic.get("shard", 0)
    return {"losses": losses, "gradients": gradients, "sizes": sizes, "most": most, "sent": sent}


def compared(
    recipe: TrainConfig, levers: Iterable[str], world, *, spoiled: int | None = None
) -> dict[str, Any]:
    """Return what each lever finds, and "stock" what none does."""
    async_collectives.LEAST = 64  # tiny collectives are cut too
    os.environ["LOCAL_WORLD_SIZE"] = "2"  # as on machines of two ranks
    found = {}
    for name, values in {"stock": {"overlap": False}, **{name: LEVERS[name] for name in levers}}.items():
        raw = configs.dump(recipe)
        raw["run"]["dir"] += f"/{name.replace(' ', '-')}"
        found[name] = trained(build_recipe(raw | {"ethernet": values}), world, spoiled=spoiled)
    return found


def assert_equal(found: dict[str, Any], *, steps: int = STEPS) -> None:
    stock = found["stock"]
    assert len(stock["gradients"]) == steps
    for name, other in found.items():
        assert other["losses"] == pytest.approx(stock["losses"], rel=1e-6), name
        assert_gradients_equal(other["gradients"][0], stock["gradients"][0], tolerance=1e-6)
        for ours, theirs in zip(other["gradients"], stock["gradients"], strict=True):
            # AdamW moves a weight by the sign of a gradient near zero: a rounding shows in the next step
            assert_gradients_equal(ours, theirs, tolerance=1e-5)


def assert_gradients_equal(ours, theirs, *, tolerance: float) -> None:
    norm = torch.stack([gradient.double().norm() for gradient in theirs.values()]).norm()
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        difference = (gradient.double() - theirs[name].double()).norm()
        assert difference <= tolerance * (theirs[name].double().norm() + 1e-3 * norm), name


def test_no_lever_changes_losses_or_gradients_of_two_ranks(on_two_ranks):
    for found in on_two_ranks:
        assert found.keys() == {"stock", *LEVERS}
        assert_equal(found)


@pytest.mark.filterwarnings("ignore")  # the compiler warns of what it does itself
@pytest.mark.parametrize("layout", HERE, ids=str)
def test_no_lever_changes_losses_or_gradients_of_a_layout(in_layouts, layout):
    for found in in_layouts.of(str(layout)):
        assert_equal(found)


@pytest.mark.parametrize(
    ("parallel", "levers"),
    [({}, ("overlap", "all", "breadth first")), ({"shard": 1, "replicate": 2}, ("all",))],
    ids=["shards", "copies"],
)
def test_nothing_of_a_step_that_is_not_taken_is_left_over(corpus, tmp_path, parallel, levers):
    """The second of three, spoiled on one rank: what it kept, deferred or summed is in no later gradient."""
    recipe = recipe_of(
        corpus, tmp_path, rows=2, run={"dir": str(tmp_path), "steps": STEPS + 1}, parallel=parallel
    )
    for found in on_ranks(lambda world: compared(recipe, levers, world, spoiled=2), ranks=2):
        assert_equal(found)


def test_bytes_under_way_and_bytes_sent_are_those_that_were_promised(on_two_ranks):
    """In units of blocks b and the root r: each half goes over the wire between two ranks."""
    for found in on_two_ranks:
        sizes = found["stock"]["sizes"]
        blocks = sum(size for name, size in sizes.items() if name.startswith("layers."))
        b, r = blocks / 4, sum(sizes.values()) - blocks
        most = {name: found[name]["most"] for name in ("overlap", "window", "no window", "breadth first")}
        assert most == {  # the first block goes alone, so that nothing delays it: of four, three are left
            "overlap": max(2 * b, r), "window": max(b, r), "no window": max(3 * b, r),
            "breadth first": max(2 * b, r),
        }  # fmt: skip
        sent = {
            "stock": 3 * (8 * b + r) + 2 * 3 * (4 * b + r),  # gloo reduces for all
            "overlap": (6 + 4 + 4) * b + r + 3 * (4 * b + r),  # two stay at each turn, the root all the time
            "window": (7 + 6 + 6) * b + r + 3 * (4 * b + r),
            "keep": 4 * b + r + 2 * (4 * b + r),
            "all": 2 * (4 * b + r),
            "breadth first": (4 + 2) * b + r + 4 * b + r,  # two stay at the turn
            "breadth first, waiting": (4 + 4) * b + r + 2 * (4 * b + r),
            "breadth first, all": 2 * (4 * b + r),
        }
        for name, expected in sent.items():
            assert expected / 2 <= found[name]["sent"] <= expected / 2 + 500, name


def summed_in(recipe: TrainConfig, schedules: Iterable[str], world) -> dict[str, Any]:
    """Return the losses and the first step's gradients of a model that computes in bfloat16."""
    raw, found = configs.dump(recipe), {}
    for name in schedules:
        raw["run"]["dir"] += f"/{name}"
        found[name] = trained(build_recipe(raw | {"ethernet": {"schedule": name, "keep_mib": INF}}), world)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_in_bfloat16_are_added_up_in_float32_in_either_schedule(corpus, tmp_path, ranks):
    """Six or twelve micro-batches a rank: their sum in bfloat16 would be off by some parts in a thousand."""
    recipe = recipe_of(corpus, tmp_path, compute="bfloat16")
    schedules = ("depth_first", "breadth_first")
    for found in on_ranks(lambda world: summed_in(recipe, schedules, world), ranks=ranks):
        ours, theirs = (found[name]["gradients"][0] for name in schedules)
        blocks = [name for name in theirs if name.startswith("layers.")]
        assert_gradients_equal(
            {name: ours[name] for name in blocks}, {name: theirs[name] for name in blocks}, tolerance=2e-4
        )


def order_of(recipe: TrainConfig, world) -> list[tuple[str, int]]:
    """Return the order in which a step's blocks compute, forward and back."""
    state, seen = open_state(recipe, world), []
    for index, block in enumerate(state.model.layers):

        def watch(_module, _inputs, output, index=index) -> None:
            if output.requires_grad:
                seen.append(("forward", index))
                output.register_hook(lambda _: seen.append(("backward", index)))

        block.mlp.register_forward_hook(watch)
    records_of(state, recipe, world)
    return seen


def test_breadth_first_a_block_computes_for_all_micro_batches_before_the_next(corpus, tmp_path):
    recipe = recipe_of(
        corpus,
        tmp_path,
        rows=2,
        run={"dir": str(tmp_path), "steps": 1},
        ethernet={"schedule": "breadth_first"},
        validate={"every": 0},
    )
    blocks = range(MODEL["num_hidden_layers"])
    forward = [("forward", block) for block in blocks for _ in range(MICRO_BATCHES)]
    expected = [*forward, *(("backward", block) for _, block in reversed(forward))]
    assert on_ranks(partial(order_of, recipe), ranks=2) == [expected] * 2


class Watched:
    """A sum under way, whose numbers nobody may touch until it is waited for."""

    def __init__(self, work, x) -> None:
        self.work, self.x, self.version = work, x, x._version

    def wait(self) -> None:
        assert self.x._version == self.version, "changed while it was summed in place"
        self.work.wait()


def in_watched_sums(recipe, world) -> int:
    begun = []

    def begin_sum(x, group, *, operations) -> list[Watched]:
        works = operations_begin_sum(x, group, operations=operations)
        begun.extend(Watched(work, x) for work in works)
        return begun[-len(works) :]

    operations_begin_sum, reductions.begin_sum = reductions.begin_sum, begin_sum
    records_of(open_state(recipe, world), recipe, world)
    return len(begun)


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {"shard": 1, "replicate": 2}), (4, {"replicate": 2})])
def test_no_gradient_is_touched_while_copies_sum_it(corpus, tmp_path, ranks, parallel):
    recipe = recipe_of(corpus, tmp_path, parallel=parallel)
    units = MODEL["num_hidden_layers"] + 1
    assert on_ranks(partial(in_watched_sums, recipe), ranks=ranks) == [units * STEPS] * ranks
