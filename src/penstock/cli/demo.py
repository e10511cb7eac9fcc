"""Demo of the whole workflow on this machine: prepare, train, stop, rescale, verify, export, generate.

example:
  penstock demo
  penstock demo --dir /tmp/demo --quick

Prepares the Python standard library's own sources (no download), trains a small Llama on two
processes, stops it halfway, resumes on one and then on three processes, verifies that no sample was lost
or repeated, exports the model, generates some Python, and draws a report. Then it tunes a model that has
read facts on conversations: it learns to answer questions and to call a tool, as an adapter that is served
and evaluated. Every step is an ordinary penstock command, printed before it runs. Takes seven to ten minutes
on two cores; with --quick, which uses a few packages of the library and fewer steps, about four.

exit codes: 0 all steps done and verified, 1 a step failed
"""

import argparse
import json
import os
import shlex
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from penstock.cli.demo_commands import interrupted, output, penstock, say, say_time
from penstock.cli.demo_tuning import TunedModel, tune
from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError
from penstock.core.units import duration
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.sinks.jsonl import read_records

_MARKER = ".penstock-demo"
_LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data")
_QUICK_PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest")
_QUICK_SETTINGS = ("--set", "run.steps=60", "--set", "schedule.decay_steps=24", "--set", "validate.every=12")
_MIN_RIGHT, _MAX_BEFORE = 0.7, 0.05
"""Share of right answers after tuning, at least, and before, at most."""
_MAX_PROCESSES = 3
_PROMPT = "def read_lines(path):\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="folder of the run (runs/demo)")
    parser.add_argument("--quick", action="store_true", help="fewer packages and steps")


def run(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    start, folder = clock.monotonic(), arguments.dir
    _make_room(folder)
    recipe = folder / "recipe.toml"
    template = files("penstock.cli").joinpath("demo.toml").read_text(encoding="utf-8")
    recipe.write_text(template.replace("@DIR@", str(folder)), encoding="utf-8")
    _prepare(folder / "corpus", quick=arguments.quick)
    with _enough_devices():
        _train(folder, recipe, _QUICK_SETTINGS if arguments.quick else ())
    say("5. Prove that the three runs together are the uninterrupted one")
    penstock("data", "audit", folder)
    say("6. Export to Hugging Face format")
    penstock("export", folder, "--out", folder / "model")
    say("7. Let it write Python: the model continues the prompt")
    sampling = ("--max-tokens", 120, "--temperature", 0.7, "--seed", 1)
    penstock("generate", folder / "model", "--prompt", _PROMPT, *sampling)
    print()
    say("8. Draw the report")
    penstock("report", folder)
    tuned = tune(folder / "tuned", first_step=9)
    say_time()
    return _summarise(folder, tuned, seconds=clock.monotonic() - start)


def _prepare(out: Path, *, quick: bool) -> None:
    say("1. Text to tokens: the standard library's sources, with a tokenizer trained on them")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = [stdlib / name for name in _QUICK_PACKAGES] if quick else [stdlib]
    chosen = ("--suffix", ".py", "--exclude", *_LEFT_OUT)
    penstock(
        "data", "prepare", *sources, *chosen, "--train-tokenizer", 2048, "--max-errors", 100, "--out", out
    )


def _train(folder: Path, recipe: Path, settings: Sequence[str]) -> None:
    command = ("train", recipe, *settings)
    steps = json.loads(output(*command, "--dry-run", "--json"))["recipe"]["run"]["steps"]
    say("2. Train on two processes, and stop in mid-run")
    interrupted(*command, "--processes", 2, folder=folder, at_step=steps // 3)
    say("3. Resume on one process, and stop again")
    interrupted(*command, folder=folder, at_step=steps // 2)
    say("4. Resume on three processes, to the end")
    penstock(*command, "--processes", _MAX_PROCESSES)


@contextmanager
def _enough_devices() -> Iterator[None]:
    """Context manager: commands use processors where there are fewer GPUs than processes."""
    from penstock.devices import accelerator  # imports torch, which takes seconds that --help does not spend

    gpus = accelerator.count()
    if gpus == 0 or gpus >= _MAX_PROCESSES:
        yield
        return
    print(
        f"GPUs here: {gpus}. Each process takes one, and the demo trains on up to {_MAX_PROCESSES}: "
        "steps 2 to 4 use processors."
    )
    hidden, before = "CUDA_VISIBLE_DEVICES", dict(os.environ)
    os.environ[hidden] = ""
    try:
        yield
    finally:
        os.environ.pop(hidden)
        os.environ.update(before)


def _make_room(folder: Path) -> None:
    if folder.exists():
        if not (folder / _MARKER).is_file():
            raise UsageError(
                f"{folder} exists and was not made by the demo", fix="Give another folder with --dir."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARKER).touch()


def _summarise(folder: Path, tuned: TunedModel, *, seconds: float) -> int:
    entropy = json.loads(output("data", "describe", folder / "corpus", "--json"))["unigram_entropy"]
    records: list[dict[str, Any]] = read_records(folder / METRICS_FILE)
    losses = [record["validation_loss"] for record in records if "validation_loss" in record]
    starts = [f"{r['ranks']} from step {r['step']}" for r in records if r.get("event") == "start"]
    rate = median(record["tokens_per_s"] for record in records if "loss" in record)
    lines = {
        "processes": ", ".join(starts),
        "order": "every sample trained on once, as in an uninterrupted run",
        "validation": f"{losses[0]:.3f} -> {losses[-1]:.3f} nats per token",
        "": f"{entropy:.3f} is what token frequencies alone would give",
        "speed": f"{rate:,.0f} tokens/s, median",
        "tuned": f"{tuned.before:.0%} -> {tuned.after:.0%} of {tuned.asked} new questions answered right",
        "report": folder / "report.html",
        "model": f"{folder / 'model'}, which transformers opens",
        "try next": shlex.join(["penstock", "chat", str(folder / "model")]),
        " ": shlex.join(["penstock", "data", "describe", str(folder / "corpus")]),
        "  ": shlex.join(["penstock", "train", str(folder / "recipe.toml"), "--set", "run.steps=1500"]),
        "   ": shlex.join(["penstock", "chat", str(tuned.run)]),
    }
    print(f"\n== Done in {duration(seconds)}")
    for name, text in lines.items():
        print(f"   {name:<12}{text}")
    if losses[-1] > entropy - 0.5:
        raise PenstockError(
            "The validation loss is not well below the unigram entropy", got=round(losses[-1], 3)
        )
    if tuned.after < _MIN_RIGHT or tuned.before > _MAX_BEFORE:
        raise PenstockError(
            "Tuning did not teach the questions", got=f"{tuned.before:.0%} -> {tuned.after:.0%}"
        )
    return 0
