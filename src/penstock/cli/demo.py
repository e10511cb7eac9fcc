"""Demo of the whole workflow on this machine: prepare, train, stop, rescale, verify, export, generate.

example:
  penstock demo
  penstock demo --dir /tmp/demo --quick

Prepares the Python standard library's own sources (no download), trains a small Llama on two
processes, stops it halfway, resumes on one and then on three processes, verifies that no sample was lost
or repeated, exports the model, generates some Python, and draws a report. Every step is an ordinary
penstock command, printed before it runs. Takes five to eight minutes on two cores; with --quick, which
uses a few packages of the library and fewer steps, about two.

exit codes: 0 all steps done and verified, 1 a step failed
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from penstock.core import clock
from penstock.core.errors import PenstockError, UsageError
from penstock.core.units import duration
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.sinks.jsonl import read_records

_MARKER = ".penstock-demo"
_LEFT_OUT = ("test", "tests", "idle_test", "site-packages", "__pycache__", "pydoc_data")
_QUICK_PACKAGES = ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest")
_QUICK_SETTINGS = ("--set", "run.steps=60", "--set", "schedule.decay_steps=24", "--set", "validate.every=12")
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
    _train(folder, recipe, _QUICK_SETTINGS if arguments.quick else ())
    _say("5. Prove that the three runs together are the uninterrupted one")
    _penstock("data", "audit", folder)
    _say("6. Export to Hugging Face format")
    _penstock("export", folder, "--out", folder / "model")
    _say("7. Let it write Python: the model continues the prompt")
    sampling = ("--max-tokens", 120, "--temperature", 0.7, "--seed", 1)
    _penstock("generate", folder / "model", "--prompt", _PROMPT, *sampling)
    print()
    _say("8. Draw the report")
    _penstock("report", folder)
    return _summarise(folder, seconds=clock.monotonic() - start)


def _prepare(out: Path, *, quick: bool) -> None:
    _say("1. Text to tokens: the standard library's sources, with a tokenizer trained on them")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = [stdlib / name for name in _QUICK_PACKAGES] if quick else [stdlib]
    chosen = ("--suffix", ".py", "--exclude", *_LEFT_OUT)
    _penstock(
        "data", "prepare", *sources, *chosen, "--train-tokenizer", 2048, "--max-errors", 100, "--out", out
    )


def _train(folder: Path, recipe: Path, settings: Sequence[str]) -> None:
    command = ("train", recipe, *settings)
    steps = json.loads(_output(*command, "--dry-run", "--json"))["recipe"]["run"]["steps"]
    _say("2. Train on two processes, and stop in mid-run")
    _interrupted(*command, "--processes", 2, folder=folder, at_step=steps // 3)
    _say("3. Resume on one process, and stop again")
    _interrupted(*command, folder=folder, at_step=steps // 2)
    _say("4. Resume on three processes, to the end")
    _penstock(*command, "--processes", 3)


def _make_room(folder: Path) -> None:
    if folder.exists():
        if not (folder / _MARKER).is_file():
            raise UsageError(
                f"{folder} exists and was not made by the demo", fix="Give another folder with --dir."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARKER).touch()


def _say(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _command(words: Sequence[object]) -> list[str]:
    return [sys.executable, "-m", "penstock", *map(str, words)]


def _show(words: Sequence[object]) -> None:
    print(f"$ penstock {shlex.join(map(str, words))}", flush=True)


def _penstock(*words: object) -> None:
    _show(words)
    code = subprocess.run(_command(words), check=False).returncode
    if code:
        raise PenstockError(f"That command exited with {code}", fix="Its message is above.")


def _output(*words: object) -> str:
    done = subprocess.run(_command(words), check=False, stdout=subprocess.PIPE, encoding="utf-8")
    if done.returncode:
        raise PenstockError(f"penstock {shlex.join(map(str, words))} exited with {done.returncode}")
    return done.stdout


def _interrupted(*words: object, folder: Path, at_step: int) -> None:
    """Run a training command and send it SIGTERM once it has logged a step."""
    _show(words)
    with subprocess.Popen(_command(words)) as process:
        while process.poll() is None:
            records = read_records(folder / METRICS_FILE)
            if records and records[-1]["step"] >= at_step:
                print(f"$ kill -TERM {process.pid}", flush=True)
                os.kill(process.pid, signal.SIGTERM)
                break
            clock.sleep(0.2)
    if process.returncode != 75:
        raise PenstockError(f"Training exited with {process.returncode}, not with 75 after saving")


def _summarise(folder: Path, *, seconds: float) -> int:
    entropy = json.loads(_output("data", "describe", folder / "corpus", "--json"))["unigram_entropy"]
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
        "report": folder / "report.html",
        "model": f"{folder / 'model'}, which transformers opens",
        "try next": shlex.join(["penstock", "chat", str(folder / "model")]),
        " ": shlex.join(["penstock", "data", "describe", str(folder / "corpus")]),
        "  ": shlex.join(["penstock", "train", str(folder / "recipe.toml"), "--set", "run.steps=1500"]),
    }
    print(f"\n== Done in {duration(seconds)}")
    for name, text in lines.items():
        print(f"   {name:<12}{text}")
    if losses[-1] > entropy - 0.5:
        raise PenstockError(
            "The validation loss is not well below the unigram entropy", got=round(losses[-1], 3)
        )
    return 0
