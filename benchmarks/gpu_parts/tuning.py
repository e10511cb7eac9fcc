"""Tuning figures of one GPU: LoRA at 8B on a base in bfloat16 and in 4 bits, beside PEFT and transformers.

Settings are measured as training.py measures its own, one after another for want of memory: tokens/s of whole
rows, and peak memory. The base has random weights; it is written once, to memory where there is room.
"""

import shutil
import sys
import tempfile
from functools import cached_property
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402

from gpu_parts.instruments import GIB, canary, run_cases, set_up  # noqa: E402
from gpu_parts.machine import is_null_gpu  # noqa: E402
from gpu_parts.part import open_part  # noqa: E402
from gpu_parts.peft_loop import FourBitPeftLoop, PeftLoop  # noqa: E402
from gpu_parts.training import MEMORY, SHAPES, TINY, Ours, Training, recipe_of  # noqa: E402
from penstock.checkpoint.hf import save_pretrained  # noqa: E402
from penstock.models import FAMILIES  # noqa: E402
from penstock.nn.unfilled import on_device, unfilled  # noqa: E402
from penstock.parallel.mesh import join  # noqa: E402

BASE_GIB = 20.0
BF16, PEFT, PEFT_EAGER = "lora compiled", "peft lora compiled", "peft lora eager"
INT4, NF4 = "lora on int4 compiled", "peft lora on nf4 of bitsandbytes"
SETTINGS = {
    BF16: (Ours, {"compiled": True}),
    PEFT: (PeftLoop, {"compiled": True}),
    PEFT_EAGER: (PeftLoop, {}),
    INT4: (Ours, {"compiled": True, "weights": "int4"}),
    NF4: (FourBitPeftLoop, {}),
}


def tune_section(weights):
    """Return the section of a recipe that tunes a base with some kind of weights."""
    return {"method": "lora", "rank": 16, "alpha": 32.0, "base": weights}


class Tuning(Training):
    """The rows of this part. On the null GPU the shape is tiny: it would take the host's memory."""

    verb = "tune"
    without_mfu = frozenset(SETTINGS)

    def __init__(self, part, world, folder):
        super().__init__(part, world, folder)
        self.is_small = self.is_tiny or is_null_gpu()

    def recipe(self, shape, *, layers, rows=1, weights="compute", **options):  # noqa: ARG002 - there is one base
        """Return a recipe that tunes the base, in a run of its own."""
        self._runs += 1
        return recipe_of(
            self.folder / f"run-{self._runs}", {}, rows=rows, length=self.length,
            base=self.base, tune=tune_section(weights), **options,
        )  # fmt: skip

    @cached_property
    def base(self):
        """Folder of a model with random weights in bfloat16."""
        model = TINY if self.is_small else SHAPES["8b"]
        config = recipe_of(self.folder, model, rows=1, length=self.length).model
        with unfilled():
            network = FAMILIES[config.model_type](config)
        network = on_device(network.to(torch.bfloat16), self.device)
        state = {name: weight.detach().normal_(std=0.02) for name, weight in network.named_parameters()}
        save_pretrained(state, config, self.folder / "base")
        return self.folder / "base"

    def tried(self):
        """Whatever files rows, in tiny shapes and uncompiled."""
        self.compare("8b", {"lora eager": (Ours, {}), PEFT_EAGER: SETTINGS[PEFT_EAGER]}, rows=1)

    def eight_b(self):
        """LoRA on bfloat16, beside PEFT."""
        self.compare(
            "8b", {name: SETTINGS[name] for name in (BF16, PEFT, PEFT_EAGER)}, rows=1, together=False
        )
        self.ratio("8b", BF16, PEFT)
        self.ratio("8b", BF16, PEFT_EAGER)

    def eight_b_int4(self):
        """LoRA on a base in 4 bits, beside PEFT on bitsandbytes' where it is installed."""
        self.compare("8b", {name: SETTINGS[name] for name in (INT4, NF4)}, rows=1, together=False)
        self.ratio("8b", INT4, NF4)


def main():
    part = open_part("tuning", __doc__.partition("\n")[0])
    set_up(part.device, compiles=False)
    is_roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > BASE_GIB * GIB
    with tempfile.TemporaryDirectory(dir=MEMORY if is_roomy else None) as folder, join() as world:
        rows = Tuning(part, world, Path(folder))
        run_cases(
            part,
            {
                "tuning-canary": lambda: canary(
                    part, lambda tried: Tuning(tried, world, Path(folder) / "tried").tried()
                ),
                "tune-8b": rows.eight_b,
                "tune-8b-int4": rows.eight_b_int4,
            },
        )


if __name__ == "__main__":
    main()
