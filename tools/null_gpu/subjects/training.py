"""Counts of training: a step of Penstock and of the plain loop, its parts, and the loss alone.

    python -m tools.null_gpu.subjects.training SETTING...

A setting is `plain`, or the name of a compute type of our matrices (`compute` is bfloat16). The shape is
Llama 3.2 1B, compiled, two rows of 4,096 tokens of one document each. Counts are those of one step: the
difference of five steps and two, by three. Memory is that of torch's allocator, which is the real one, beside
the plan's.

`mixed` is two layers over documents shorter and longer than a row: what is compiled after the first step.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_parts.plain_loop import PlainLoop
from gpu_parts.training import Ours, recipe_of
from torch._dynamo.utils import counters

from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import World, join
from penstock.train import step
from penstock.train.planning.memory import memory_plan
from tools.null_gpu.region import Region

LAYERS, FEW_LAYERS = 16, 2
TOKENS, HIDDEN, VOCABULARY = 8192, 2048, 128_256
_OF_FSDP = ("ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "chunk_cat", "split_with_sizes_copy")
_MAX_KERNELS, _MAX_NAME = 20, 140
_MIXED = 15  # steps over a mixed corpus
_SHORT, _LONG = 2, 5  # steps of the two turns that are subtracted


def step_counts(world: World, setting: str, layers: int) -> dict[str, object]:
    """Return the counts of a step."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(
            Path(folder),
            {"preset": "llama3.2-1b", "num_hidden_layers": layers},
            rows=2,
            length=4096,
            compiled=True,
            linear="compute" if setting == "plain" else setting,
        )
        trainer = (PlainLoop if setting == "plain" else Ours)(recipe, world)
        with Region() as first:  # the steps in which memory for saves is taken
            trainer.turn(_SHORT - 1)
        launches = _watched(trainer)
        with Region() as short:
            trainer.turn(_SHORT - 1)
        of_optimizer = launches.total()
        launches.clear()
        with Region() as long:
            trainer.turn(_LONG - 1)
        steps = _LONG - _SHORT
        totals = {name: (long.totals[name] - short.totals[name]) / steps for name in long.totals}
        kernels = long.kernels - short.kernels
        found: dict[str, object] = dict(totals)
        found |= {name: first.totals[name] for name in ("largest_pinned", "largest_pinned_by_main")}
        found["optimizer_launches"] = (launches.total() - of_optimizer) / steps
        found["of_fsdp"] = (
            sum(n for name, n in kernels.items() if any(one in name for one in _OF_FSDP)) / steps
        )
        found["kernels"] = _named(kernels.most_common(_MAX_KERNELS), steps)
        found["waits_at"] = {place: n / steps for place, n in (long.waits - short.waits).items()}
        if isinstance(trainer, Ours):
            found |= _memory(trainer)
    torch.compiler.reset()
    return found


def _named(kernels: Iterable[tuple[str, int]], steps: int) -> dict[str, float]:
    """Return launches of a step by the beginning of a kernel's name; of several with one, their sum."""
    found = Counter[str]()
    for name, launches in kernels:
        found[name[:_MAX_NAME]] += launches
    return {name: launches / steps for name, launches in found.most_common() if launches}


def _memory(trainer: Ours) -> dict[str, object]:
    """Return the peak of the tensors of two steps, what the plan says, and how far off it is."""
    others = torch.cuda.memory_allocated() - trainer.kept_bytes
    torch.cuda.reset_peak_memory_stats()
    trainer.turn(1)
    peak = torch.cuda.max_memory_allocated() - others
    plan = memory_plan(trainer.recipe, RankLayout(), on_cpu=False).total
    return {"peak_bytes": peak, "planned_bytes": plan, "plan_off_percent": abs(100 * (plan / peak - 1))}


def mixed_counts(world: World) -> dict[str, object]:
    """Return the micro-batches of whole and of packed rows, and the programs made after the first step.

    Raises:
        RuntimeError: the corpus has not both kinds, so nothing was shown.
    """
    kinds, cut = Counter[str](), step.micro_batches

    def watched(*args: Any, **options: Any) -> Iterator[dict[str, Any]]:  # Any: as `micro_batches`
        for part in cut(*args, **options):
            kinds["whole" if part[step.WHOLE_ROWS] else "packed"] += 1
            yield part

    with tempfile.TemporaryDirectory() as folder:
        recipe = recipe_of(
            Path(folder),
            {"preset": "llama3.2-1b", "num_hidden_layers": FEW_LAYERS},
            rows=2,
            length=4096,
            compiled=True,
            corpus="synthetic:tokens=1e11,mean_document=6000,vocab_size=500",
        )
        trainer = Ours(recipe, world)
        trainer.turn(1)
        before = counters["stats"]["unique_graphs"]
        step.micro_batches = watched
        trainer.turn(_MIXED)
        step.micro_batches = cut
        later = counters["stats"]["unique_graphs"] - before
    torch.compiler.reset()
    if len(kinds) < 2:
        raise RuntimeError(f"micro-batches of one kind only: {dict(kinds)}")
    return {"compiled_later": later, "compiled_before": before, **kinds}


def _watched(trainer: Ours | PlainLoop) -> Counter[str]:
    """Have launches of the optimizer's step counted from now on."""
    optimizer = trainer.state.optimizer if isinstance(trainer, Ours) else trainer._adamw
    launches, before = Counter[str](), [0]

    def begin(*_: object) -> None:
        before[0] = Region.so_far("launches")

    def end(*_: object) -> None:
        launches["step"] += Region.so_far("launches") - before[0]

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
    return launches


def loss_counts(device: torch.device) -> dict[str, object]:
    """Return the counts of the loss, forward and backward, with gradients of hidden states and matrix."""
    hidden = torch.zeros(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(VOCABULARY, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(TOKENS, device=device, dtype=torch.int64)

    def work() -> None:
        loss = cross_entropy(hidden, OutputHead(weight), labels)[0]
        torch.autograd.grad(loss, (hidden, weight))

    work()
    with Region() as seen:
        work()
    return {**seen.totals, "waits_at": dict(seen.waits)}


def main() -> None:
    """Print the counts of some settings, and of the loss with `compute`."""
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    with join() as world:
        for setting in sys.argv[1:]:
            if setting == "mixed":
                found["train mixed"] = mixed_counts(world)
                continue
            name = "bfloat16" if setting == "compute" else setting
            found[f"train {name}"] = whole = step_counts(world, setting, LAYERS)
            if setting in ("plain", "compute"):
                few = step_counts(world, setting, FEW_LAYERS)
                of_block = (whole["launches"] - few["launches"]) / (LAYERS - FEW_LAYERS)  # type: ignore[operator]
                found[f"train {name}, a block"] = {"launches": of_block}
            if setting == "compute":
                found["loss"] = loss_counts(world.device)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
