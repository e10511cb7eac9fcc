"""Counts of training: a step of Penstock and of the plain loop, its parts, and the loss alone.

    python -m tools.null_gpu.subjects.training SETTING...

A setting is `plain`, or the name of a compute type of our matrices (`compute` is bfloat16). The shape is
Llama 3.2 1B, compiled, two rows of 4,096 tokens of one document each. Counts are those of one step: the
difference of five steps and two, by three.
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from gpu_parts.plain_loop import PlainLoop
from gpu_parts.training import Ours, recipe_of

from penstock.nn.cross_entropy import cross_entropy
from penstock.nn.head import OutputHead
from penstock.parallel.mesh import World, join
from tools.null_gpu.region import Region

LAYERS, FEW_LAYERS = 16, 2
TOKENS, HIDDEN, VOCABULARY = 8192, 2048, 128_256
_OF_FSDP = ("ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "chunk_cat", "split_with_sizes_copy")
_MOST_KERNELS, _MOST_NAME = 20, 140
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
        found["optimizer_launches"] = (launches.total() - of_optimizer) / steps
        found["of_fsdp"] = (
            sum(n for name, n in kernels.items() if any(one in name for one in _OF_FSDP)) / steps
        )
        found["kernels"] = {name[:_MOST_NAME]: n / steps for name, n in kernels.most_common(_MOST_KERNELS)}
        found["waits_at"] = {place: n / steps for place, n in (long.waits - short.waits).items()}
    torch.compiler.reset()
    return found


def _watched(trainer: Ours | PlainLoop) -> Counter[str]:
    """Have launches of the optimizer's step counted from now on."""
    optimizer = trainer.state.optimizer if isinstance(trainer, Ours) else trainer._adamw
    launches, before = Counter[str](), [0]

    def begin(*_: object) -> None:
        before[0] = Region.launches_so_far()

    def end(*_: object) -> None:
        launches["step"] += Region.launches_so_far() - before[0]

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
