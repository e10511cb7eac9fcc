"""Training figures of one GPU: tokens/s, MFU, memory beside its prediction, checkpoints, the loader.

What runs is `penstock.train.loop.train` with the state that `penstock train` opens, and beside it a plain
loop of torch's own parts (plain_loop.py). Settings that fit into memory together take turns. A step time is
the mean of all turns, the first step of each left out. Rows are filed after the first turn, and again with
all turns. MFU counts as PaLM does (`DecoderConfig.flops_per_token`: attention without its causal half), over
rows that are one document each, so that attention sees whole rows.
"""

import shutil
import statistics
import struct
import sys
import tempfile
from functools import cached_property, partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from gpu_parts.instruments import (  # noqa: E402
    GIB,
    allocated_bytes,
    attempt,
    canary,
    free,
    free_bytes,
    in_turns,
    matrix_flops,
    peak_bytes,
    per_step,
    profiled,
    reset_peak,
    run_cases,
    seconds_of,
    set_up,
)
from gpu_parts.machine import is_null_gpu  # noqa: E402
from gpu_parts.part import open_part  # noqa: E402
from gpu_parts.plain_loop import PlainLoop  # noqa: E402
from penstock.core import clock  # noqa: E402
from penstock.data.formats.flat_layouts import HEADER, MAGIC  # noqa: E402
from penstock.devices import accelerator  # noqa: E402
from penstock.nn.linear.float8 import (  # noqa: E402
    RECIPES,
    Float8TrainingLinear,
    Multiply,
    has_native,
)
from penstock.nn.linear.lora import rounded_by_block  # noqa: E402
from penstock.obs.meter import (  # noqa: E402
    Phases,
    StepMeter,
    stamps_for,
)
from penstock.obs.peak import known_peak_flops  # noqa: E402
from penstock.parallel.layout import RankLayout  # noqa: E402
from penstock.parallel.mesh import join  # noqa: E402
from penstock.testing.step_memory import LiveBytes  # noqa: E402
from penstock.train.loop import meta_of, open_saver, train  # noqa: E402
from penstock.train.planning.memory import memory_plan  # noqa: E402
from penstock.train.resolve.load import build_recipe  # noqa: E402
from penstock.train.setup import open_state  # noqa: E402

SHAPES = {"1b": {"preset": "llama3.2-1b"}, "8b": {"preset": "llama3.1-8b"}}
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
LENGTH, TINY_LENGTH = 4096, 32
MFU_TARGET, FLOAT8_TARGET, WAIT_TARGET = 49.0, 1.15, 0.2
PRODUCTS_TARGET, FIRST_SAVE_TARGET_S = 1.25, 1.0
COMPILED_S, EAGER_S = 18.0, 8.0  # to open one setting and take its first steps
PROFILE_S, SAVE_S, WRITTEN_S, TURN_S = 3.0, 20.0, 25.0, 1.0
MORE_ROUNDS = 2
LAYERS_8B = 8  # of 32: with float32 masters and moments they fit into 80 GB
RESERVED_GIB = 18.0  # of the context, workspaces, copies in float8 and the gaps of the allocator
MEMORY, CHECKPOINTS_GIB = Path("/dev/shm"), 35.0  # a file system in memory; two saves and their staging
_UINT8 = 1  # Megatron's code of the type
LOSS_BYTES = 10  # of the plain loop for a logit: bfloat16 and float32, and their gradients


class TurnOverError(Exception):
    """Ends a turn of the training loop, which would save a checkpoint if it were asked to stop."""


class Ours:
    """Penstock's training, a few steps at a time."""

    def __init__(self, recipe, world):
        self.recipe, self.world = recipe, world
        self.state = open_state(recipe, world)
        self._meter = StepMeter(
            flops_per_token=recipe.model.flops_per_token,
            peak_flops=None,
            phases=Phases(stamps_for(world.device.type)),
        )

    @property
    def kept_bytes(self):
        """Bytes of weights, frozen ones too, and optimizer state."""
        model = self.state.model
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        rounded = [product.layer for block in rounded_by_block(model) for product in block.values()]
        codes = [tensor for layer in rounded for tensor in layer.buffers()]
        kept = [*self.state.tensors().values(), *frozen, *model.buffers(), *codes]
        return sum(tensor.nbytes for tensor in kept)

    def turn(self, steps):
        """Train; return the records of the steps, the first left out."""
        records = []

        def note(record):
            if "step_s" in record:
                records.append(record)
            if len(records) > steps:
                raise TurnOverError

        try:
            train(
                self.state, self.recipe, self.world,
                meter=self._meter, stop_requested=lambda: False, sinks=[note], on_batch=lambda *_: None,
            )  # fmt: skip
        except TurnOverError:
            return records[1:]
        raise AssertionError("the loop ended by itself")


def recipe_of(
    folder, model, *, rows, length, compiled=False, linear="compute", corpus=None, base=None, **more
):
    """Return a recipe; its corpus has documents longer than rows, unless one is given.

    Args:
        model: its section; not used with a base.
        base: folder of the model to start from.
        more: other sections.
    """
    shape = {"model": {**model, "max_position_embeddings": length}}
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 10**6, **({"start_from": str(base)} if base else {})},
            **({} if base else shape),
            "data": {
                "corpora": {
                    "c": {"path": str(corpus or "synthetic:tokens=1e11,mean_document=1000000,vocab_size=500")}
                },
                "sequence_length": length,
                "global_batch_size": rows,
            },
            "precision": {"linear": linear},
            "compile": {"enabled": compiled},
            "schedule": {"rule": "constant"},
            "checkpoint": {"every": 10**6},
            "kernels": "reference" if is_null_gpu() else "auto",
            **more,
        }
    )


def write_megatron(folder, *, tokens, mean_document):
    """Write a corpus as Megatron-LM stores it, with log-normal lengths of documents; return its name."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(mean_document) - 0.5, 1.0, tokens // mean_document).astype(np.int32) + 1
    offsets = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64)))  # a token is a byte
    rng.integers(1, 250, int(lengths.sum()), dtype=np.uint8).tofile(folder / "documents.bin")
    marks = np.arange(len(lengths) + 1, dtype=np.int64)
    head = struct.pack(HEADER.format, MAGIC, 1, _UINT8, len(lengths), len(marks))
    stored = (lengths.astype("<i4"), offsets.astype("<i8"), marks.astype("<i8"))
    (folder / "documents.idx").write_bytes(head + b"".join(array.tobytes() for array in stored))
    return f"megatron:{folder / 'documents'}"


def layers_that_fit(most, needed, free):
    """Return the largest number of layers, at most `most`, whose bytes fit; 0 if one does not.

    Args:
        needed: bytes by layers, which grow with them.
        free: bytes; None: no limit is known.
    """
    return next((n for n in range(most, 0, -1) if free is None or needed(n) <= free), 0)


def needed_bytes(recipe):
    """Return the bytes that the hungrier of Penstock's step and the plain loop's takes."""
    plan, data = memory_plan(recipe, RankLayout(), on_cpu=False), recipe.data
    logits = LOSS_BYTES * data.global_batch_size * data.sequence_length * recipe.model.vocab_size
    return max(plan.total, plan.total - plan.loss + logits)


def step_tokens(recipe):
    """Return the tokens of a step."""
    return recipe.data.global_batch_size * recipe.data.sequence_length


def label_of(verb, shape, recipe, name):
    """Return what rows of a setting begin with."""
    return f"{verb} {shape} {name}, {step_tokens(recipe)} tokens a step"


def mean_of(steps):
    """Return the mean of some step times over all turns: a median would hide steps that are held up."""
    return statistics.mean(seconds for turn in steps for seconds in turn)


BF16, FLOAT8, FLOAT8_ROWS = "bfloat16 compiled", "float8 compiled", "float8 by rows compiled"
PLAIN, EAGER, PLAIN_EAGER = "plain loop compiled", "bfloat16 eager", "plain loop eager"
PROFILED = (BF16, PLAIN, FLOAT8, EAGER)
DOCUMENTS = "bfloat16 compiled, documents"
PRODUCTS = "train 8b: products and casts of a matrix"
SETTINGS = {
    BF16: (Ours, {"compiled": True}),
    FLOAT8: (Ours, {"compiled": True, "linear": "float8_tensorwise"}),
    FLOAT8_ROWS: (Ours, {"compiled": True, "linear": "float8_rowwise"}),
    PLAIN: (PlainLoop, {"compiled": True}),
    EAGER: (Ours, {}),
    PLAIN_EAGER: (PlainLoop, {}),
}


class Training:
    """The rows of this part.

    Args:
        folder: for runs and corpora.
    """

    verb = "train"
    without_mfu = frozenset({DOCUMENTS})
    """Settings whose rows attention does not see whole, or whose weights are frozen."""

    def __init__(self, part, world, folder):
        self.part, self.world, self.folder = part, world, folder
        self.device, self.is_tiny = part.device, part.is_tiny
        self.length = TINY_LENGTH if self.is_tiny else LENGTH
        self.sheet_flops = known_peak_flops(accelerator.name_of(self.device))
        self._runs = 0
        self._step_s = {}  # by shape and name of a setting

    @cached_property
    def peaks(self):
        """FLOP/s that matrix products reach, by type; filed when they are first asked for."""
        peaks = {}
        for name, dtype in (("bfloat16", torch.bfloat16), ("float8", torch.float8_e4m3fn)):
            found = attempt(
                self.part,
                f"matrix products, {name}",
                partial(matrix_flops, self.device, dtype, is_tiny=self.is_tiny),
            )
            if found is not None:
                peaks[name] = found
                self.part.measured(
                    f"matrix products, {name}", found / 1e12, "TFLOP/s", data_sheet=self._sheet(name)
                )
        return peaks

    def _sheet(self, name):
        factor = 2 if name == "float8" else 1
        return None if self.sheet_flops is None else factor * self.sheet_flops / 1e12

    def recipe(self, shape, *, rows=2, layers=None, folder=None, is_small=False, **options):
        """Return a recipe of a shape, in a run of its own."""
        self._runs += 1
        model = TINY if self.is_tiny or is_small else SHAPES[shape]
        if layers is not None:
            model = {**model, "num_hidden_layers": layers}
        return recipe_of(
            (folder or self.folder) / f"run-{self._runs}", model, rows=rows, length=self.length, **options
        )

    def compare(self, shape, settings, *, layers=None, rows=2, together=True):
        """Measure some settings of one shape.

        Args:
            settings: name -> (class of its trainer, options of its recipe).
            together: all are held at a time and take turns; False: one after another, for want of memory.
        """
        groups = [settings] if together else [{name: setting} for name, setting in settings.items()]
        for group in groups:
            self._measure_group(shape, group, layers, rows)
            torch.compiler.reset()  # programs may hold what they were made for
            free(self.device)

    def _measure_group(self, shape, settings, layers, rows):
        trainers, turns = {}, {}
        for name, (trainer_class, options) in settings.items():
            recipe = self.recipe(shape, rows=rows, layers=layers, **options)
            label = self.label(shape, recipe, name)
            opened = attempt(
                self.part,
                f"{label}: tokens/s",
                partial(self._open, trainer_class, recipe),
                needs_s=COMPILED_S if recipe.compile.enabled else EAGER_S,
                is_optional=not issubclass(trainer_class, Ours | PlainLoop),
            )
            if opened is not None:
                trainer, first_s, step_s = opened
                steps = 2 if self.is_tiny else min(30, max(4, round(TURN_S / step_s)))
                turn = partial(self._turn, trainer, steps)
                first = attempt(self.part, f"{label}: tokens/s", turn)
                if first is not None:
                    trainers[name], turns[name] = (label, recipe, trainer, first_s, first), turn
                    self.report(shape, name, label, recipe, trainer, first_s, [first])
        if len(turns) > 1 and not self.is_tiny:
            found = attempt(
                self.part,
                f"{', '.join(label for label, *_ in trainers.values())}: tokens/s",
                lambda: in_turns(turns, rounds=MORE_ROUNDS, left_s=self.part.left_s),
            )
            for name, measured in (found or {}).items():
                *about, first = trainers[name]
                self.report(shape, name, *about, [first, *measured])
        for name, (label, _, trainer, *_) in trainers.items():
            if name not in PROFILED or (self.is_tiny and name != EAGER):
                continue
            attempt(
                self.part,
                f"{label}: device busy",
                partial(self._profile, label, trainer, self._step_s[shape, name]),
                needs_s=PROFILE_S,
            )

    def _open(self, trainer_class, recipe):
        """Return (trainer, seconds until its second step was done, seconds of a step); compiles."""
        began = clock.monotonic()
        trainer = trainer_class(recipe, self.world)
        trainer.turn(1)
        first_s = clock.monotonic() - began
        (step_s,), *_ = self._turn(trainer, 1)
        return trainer, first_s, step_s

    def _turn(self, trainer, steps):
        """Return (step seconds, data-wait shares, peak bytes) of a turn."""
        others = allocated_bytes(self.device) - trainer.kept_bytes
        reset_peak(self.device)
        found = trainer.turn(steps)
        peak = peak_bytes(self.device) - others
        if not isinstance(trainer, Ours):
            return found, [], peak
        shares = found[1:] if self.device.type != "cpu" else found  # a GPU's are those of the step before
        waits = [record["data_wait_share"] for record in shares if "data_wait_share" in record]
        return [record["step_s"] for record in found], waits, peak

    def label(self, shape, recipe, name):
        """Return what rows of a setting begin with."""
        return label_of(self.verb, shape, recipe, name)

    def report(self, shape, name, label, recipe, trainer, opened_s, turns):
        """File the rows of one setting."""
        seconds = [steps for steps, *_ in turns]
        self._step_s[shape, name] = step_s = mean_of(seconds)
        tokens, part = step_tokens(recipe), self.part
        part.measured(
            f"{label}: tokens/s", tokens / step_s, "tokens/s",
            layers=recipe.model.num_hidden_layers, step_ms=[1e3 * s for steps in seconds for s in steps],
            opened_s=opened_s,
        )  # fmt: skip
        if isinstance(trainer, Ours) and name not in self.without_mfu:
            flops = tokens * recipe.model.flops_per_token(recipe.data.sequence_length) / step_s
            self._report_mfu(label, flops, is_held=(shape, name) == ("1b", BF16))
        if waits := [100 * share for _, turn, _ in turns for share in turn]:
            part.measured(
                f"{label}: waiting for data", statistics.mean(waits), "% of a step",
                at_most=WAIT_TARGET, percent=waits,
            )  # fmt: skip
        self._report_memory(label, recipe, trainer, max(peak for *_, peak in turns))

    def _profile(self, label, trainer, step_s):
        """File the share of a step in which the device computes, and what it computes longest."""
        busy_s, kernels = profiled(self.device, lambda: trainer.turn(1))  # two steps
        self.part.measured(
            f"{label}: device busy", 100 * busy_s / 2 / step_s, "% of a step",
            **per_step(kernels, 2),
        )  # fmt: skip

    def _report_mfu(self, label, flops, *, is_held):
        """File FLOP/s as shares of peaks."""
        if "bfloat16" in self.peaks:
            share = flops / self.peaks["bfloat16"]
            self.part.measured(f"{label}: MFU of the measured peak", 100 * share, "%")
        if self.sheet_flops is not None:
            target, share = MFU_TARGET if is_held else None, flops / self.sheet_flops
            self.part.measured(f"{label}: MFU of the data sheet", 100 * share, "%", at_least=target)

    def _report_memory(self, label, recipe, trainer, peak):
        is_ours = isinstance(trainer, Ours)
        if self.device.type == "cpu":  # torch counts no bytes there, and what is compiled cannot be watched
            if recipe.compile.enabled:
                return
            with LiveBytes() as seen:
                trainer.turn(1)
            peak = trainer.kept_bytes + seen.peak
        if not is_ours:
            self.part.measured(f"{label}: peak memory", peak / GIB, "GiB")
            return
        plan = memory_plan(recipe, RankLayout(), on_cpu=self.device.type == "cpu")
        self.part.measured(
            f"{label}: peak memory", peak / GIB, "GiB",
            predicted_gib=plan.total / GIB, error_percent=100 * (plan.total / peak - 1),
            predicted={name: size / GIB for name, size in plan.parts.items()}, moment=plan.moment,
        )  # fmt: skip

    def ratio(self, shape, ours, other, *, at_least=None):
        """File how many times faster one setting is than another, if both were measured."""
        first, second = (self._step_s.get((shape, name)) for name in (ours, other))
        if first and second:
            self.part.measured(
                f"{self.verb} {shape}: {ours} / {other}", second / first, "times", at_least=at_least
            )

    def tried(self):
        """Whatever files rows, in tiny shapes and uncompiled."""
        self.compare("1b", {name: SETTINGS[name] for name in (EAGER, PLAIN_EAGER)})
        self.ratio("1b", EAGER, PLAIN_EAGER, at_least=1.0)

    def one_b(self):
        """The 1B shape, 8,192 tokens a step, compiled: beside a plain loop."""
        self.compare("1b", {name: SETTINGS[name] for name in (PLAIN, BF16)})
        self.ratio("1b", BF16, PLAIN, at_least=1.03)

    def one_b_float8(self):
        """The 1B shape in float8, beside bfloat16 that was measured before."""
        names = [*([] if ("1b", BF16) in self._step_s else [BF16]), FLOAT8]
        self.compare("1b", {name: SETTINGS[name] for name in names})
        self.ratio("1b", FLOAT8, BF16)

    def one_b_eager(self):
        """The 1B shape as it comes, beside a plain loop."""
        self.compare("1b", {name: SETTINGS[name] for name in (EAGER, PLAIN_EAGER)})
        self.ratio("1b", EAGER, PLAIN_EAGER)

    def _eight_b(self, *names):
        """The 8B shape with eight layers or as many as fit, one setting after another."""
        whole = self.recipe("8b").model.num_hidden_layers
        room = free_bytes(self.device)
        layers = layers_that_fit(
            min(whole, LAYERS_8B),
            lambda n: needed_bytes(self.recipe("8b", layers=n)),
            None if room is None else room - RESERVED_GIB * GIB,
        )
        if layers == 0:
            self.part.skipped("train 8b", f"not one layer fits into {room / GIB:.0f} GiB")
            return
        self.part.measured("train 8b: layers that fit", layers, "layers", cut=whole - layers, of=whole)
        self.compare("8b", {name: SETTINGS[name] for name in names}, layers=layers, together=False)

    def eight_b(self):
        """The 8B shape beside a plain loop."""
        self._eight_b(PLAIN, BF16)
        self.ratio("8b", BF16, PLAIN, at_least=1.0)

    def eight_b_float8(self):
        """The 8B shape in float8, beside bfloat16 that was measured before."""
        self._eight_b(*([] if ("8b", BF16) in self._step_s else [BF16]), FLOAT8)
        self.ratio("8b", FLOAT8, BF16, at_least=FLOAT8_TARGET)
        attempt(self.part, f"{PRODUCTS}: float8 / bfloat16", self._products_and_casts)

    def _products_and_casts(self):
        """The three products of the widest matrix of the 8B shape, forward and backward, with their casts."""
        outputs, inputs = (64, 64) if self.is_tiny else (14_336, 4096)
        recipe = RECIPES["float8_tensorwise"]
        found = {}
        for name in ("bfloat16", "float8"):
            layer = nn.Linear(inputs, outputs, bias=False, device=self.device, dtype=torch.bfloat16)
            if name == "float8":
                layer.__class__ = Float8TrainingLinear
                layer.multiply = Multiply(recipe, has_native(recipe, self.device.type))
            x = torch.randn(2 * self.length, inputs, device=self.device, dtype=torch.bfloat16)
            slope, x = torch.randn_like(x[:, :1]).expand(-1, outputs), x.requires_grad_()
            work = layer if self.device.type == "cpu" else torch.compile(layer, dynamic=False)

            def step(work=work, x=x, weight=layer.weight, slope=slope):
                return torch.autograd.grad(work(x), (x, weight), slope)

            found[name] = seconds_of(self.device, [step], for_s=0.005 if self.is_tiny else 0.3)
            self.part.measured(f"{PRODUCTS}: {name}", 1e6 * found[name], "us")
        self.part.measured(
            f"{PRODUCTS}: float8 / bfloat16", found["bfloat16"] / found["float8"], "times",
            at_least=PRODUCTS_TARGET,
        )  # fmt: skip

    def eight_b_float8_rows(self):
        """The 8B shape in float8 with a scale for each row."""
        self._eight_b(FLOAT8_ROWS)

    def long_steps(self):
        """The 1B shape, 32,768 tokens a step."""
        self.compare("1b", {BF16: SETTINGS[BF16]}, rows=8)

    def documents(self):
        """The 1B shape over short documents in a Megatron file: what packing and reading them costs."""
        corpus = "synthetic:tokens=1e9,mean_document=20,vocab_size=500"
        if not self.is_tiny:
            corpus = write_megatron(self.folder, tokens=2 * 10**7, mean_document=900)
        self.compare("1b", {DOCUMENTS: (Ours, {"compiled": True, "corpus": corpus})})

    def checkpoint(self):
        """What saving the 1B shape holds up; to memory where there is room, so that no disk counts.

        On the null GPU the shape is tiny: it would take the host's memory.
        """
        is_roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > CHECKPOINTS_GIB * GIB

        def work():
            with tempfile.TemporaryDirectory(dir=MEMORY if is_roomy and not self.is_tiny else None) as folder:
                trainer = Ours(self.recipe("1b", folder=Path(folder), is_small=is_null_gpu()), self.world)
                trainer.turn(1)
                self._save(trainer, to="memory" if is_roomy else "disk")

        attempt(self.part, "checkpoint 1b: all saves", work, needs_s=SAVE_S)
        free(self.device)

    def _save(self, trainer, *, to):
        state, part = trainer.state, self.part
        gib = trainer.kept_bytes / GIB
        with open_saver(state, trainer.recipe) as saver:
            saver.prepare(state.tensors())
            trainer.turn(1)
            for which in ("the first save", "a later save"):
                began = clock.monotonic()
                saver.save(state.tensors(), meta_of(state, trainer.recipe, self.world))
                still_s = clock.monotonic() - began
                part.measured(
                    f"checkpoint 1b: training stands still, {which}", still_s, "s",
                    at_most=FIRST_SAVE_TARGET_S, gib=gib, to=to,
                )  # fmt: skip
                while not saver.is_idle():
                    if clock.monotonic() - began > WRITTEN_S:
                        raise TimeoutError(f"{gib:.1f} GiB were not written within {WRITTEN_S:.0f} s")
                    clock.sleep(0.02)
                written_s = clock.monotonic() - began
                part.measured(f"checkpoint 1b: written, {which}", written_s, "s", gib=gib, to=to)
                if part.left_s() < 2 * written_s:
                    break
                trainer.turn(1)


def main():
    part = open_part("training", __doc__.partition("\n")[0])
    set_up(part.device, compiles=False)
    with tempfile.TemporaryDirectory() as folder, join() as world:
        rows = Training(part, world, Path(folder))
        run_cases(
            part,
            {
                "training-canary": lambda: canary(
                    part, lambda tried: Training(tried, world, Path(folder) / "tried").tried()
                ),
                "train-1b": rows.one_b,
                "train-1b-float8": rows.one_b_float8,
                "train-8b": rows.eight_b,
                "train-8b-float8": rows.eight_b_float8,
                "train-1b-eager": rows.one_b_eager,
                "train-1b-long": rows.long_steps,
                "train-1b-documents": rows.documents,
                "train-8b-float8-rows": rows.eight_b_float8_rows,
                "checkpoint-1b": rows.checkpoint,
            },
        )


if __name__ == "__main__":
    main()
