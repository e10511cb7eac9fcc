"""What the planner says of the kit's rows, by their names: tokens/s, ms and peak memory of Penstock.

Training is predicted from its recipe (`plan.predict`), memory as `--dry-run` does, serving by `plan.decode`:
a step of decoding for each number of answers that are not done, after the forward pass of all prompts.
`benchmarks/gpu_predict.py` files the predictions for a device before a run; `planner.py` holds the run
against them.

Without a prediction are the rows of other trainers and engines, eager steps of the engine and times between
tokens (both wait for the host's Python), and training over short documents.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from serve_load import many, one

from gpu_parts.serving import COMPILED, GRAPHS, shape_of
from gpu_parts.training import (
    BF16,
    EAGER,
    FLOAT8,
    FLOAT8_ROWS,
    GIB,
    LAYERS_8B,
    LENGTH,
    SETTINGS,
    SHAPES,
    label_of,
    recipe_of,
)
from gpu_parts.tuning import BF16 as LORA
from gpu_parts.tuning import INT4 as LORA_INT4
from gpu_parts.tuning import tune_section
from penstock.models.family.config_json import config_json
from penstock.parallel.layout import RankLayout
from penstock.plan.decode import DecodeJob, predict_decode
from penstock.plan.predict import predict
from penstock.train.planning.memory import job_of, memory_plan

WITHIN = 15.0
"""Percent by which a prediction may be off."""
WEIGHT_BITS = {"bfloat16": 16, "int8": 8, "int4": 4, "float8": 8}
AT_ONCE = (64, 256)
TRAINED = (
    ("1b", BF16, 2),
    ("1b", FLOAT8, 2),
    ("1b", EAGER, 2),
    ("1b", BF16, 8),
    ("8b", BF16, 2),
    ("8b", FLOAT8, 2),
    ("8b", FLOAT8_ROWS, 2),
)
"""Shape, setting and rows of each."""
SERVED = (
    ("8b", "bfloat16", COMPILED, AT_ONCE),
    ("8b", "bfloat16", GRAPHS, AT_ONCE),
    ("8b", "int8", COMPILED, AT_ONCE[:1]),
    ("8b", "int4", COMPILED, AT_ONCE[:1]),
    ("8b", "float8", COMPILED, AT_ONCE[:1]),
    ("1b", "bfloat16", COMPILED, AT_ONCE),
)
"""Shape, weights, mode and numbers of requests of each."""


def predictions(cluster):
    """Return name of a row -> (value, unit), on one device of a cluster."""
    with TemporaryDirectory() as folder:
        return {
            **_training(cluster, Path(folder)),
            **_tuning(cluster, Path(folder)),
            **dict(_serving(cluster)),
        }


def training_prediction(recipe, cluster):
    """Return the tokens/s and the bytes of memory of a recipe whose rows are one document each."""
    memory = memory_plan(recipe, RankLayout(), on_cpu=False).total
    job = replace(job_of(recipe, RankLayout()), attention="flash3")  # SDPA takes cuDNN's kernel on Hopper
    return predict(job, cluster, memory_bytes=memory).tokens_per_s_per_device, memory


def _rows(label, recipe, cluster):
    speed, memory = training_prediction(recipe, cluster)
    return {f"{label}: tokens/s": (speed, "tokens/s"), f"{label}: peak memory": (memory / GIB, "GiB")}


def _training(cluster, folder):
    found = {}
    for shape, setting, rows in TRAINED:
        model = SHAPES[shape] | ({"num_hidden_layers": LAYERS_8B} if shape == "8b" else {})
        _, options = SETTINGS[setting]
        recipe = recipe_of(folder, model, rows=rows, length=LENGTH, **options)
        found |= _rows(label_of("train", shape, recipe, setting), recipe, cluster)
    return found


def _tuning(cluster, folder):
    found, base = {}, folder / "base"
    base.mkdir()
    model = recipe_of(folder, SHAPES["8b"], rows=1, length=LENGTH).model
    (base / "config.json").write_text(json.dumps(config_json(model)))
    _write_hollow(base / "model.safetensors", model)
    for setting, weights in ((LORA, "compute"), (LORA_INT4, "int4")):
        recipe = recipe_of(
            folder, {}, rows=1, length=LENGTH, compiled=True, base=base, tune=tune_section(weights)
        )
        found |= _rows(label_of("tune", "8b", recipe, setting), recipe, cluster)
    return found


def _write_hollow(path, model):
    """Write a file of bfloat16 weights whose numbers are a hole: of them nothing is read."""
    header, end = {}, 0
    for ours, stored in model.stored_rows.items():
        shape = model.parameter_shapes[ours]
        begin, end = end, end + 2 * math.prod(shape)
        header[stored.tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _serving(cluster) -> Iterator[tuple[str, tuple[float, str]]]:
    for shape, weights, mode, counts in SERVED:
        label, vocabulary = f"serve {shape} {weights}, {mode}", shape_of(shape, is_tiny=False).vocab_size
        alone = one(32, 128, vocabulary=vocabulary, seed=1)
        _, decode_s, _ = serving_prediction(shape, weights, mode, alone, cluster)
        yield f"{label}, alone: ms/token", (1e3 * decode_s / 127, "ms")
        for count in counts:
            requests = many(count, vocabulary=vocabulary, seed=count)
            prompts_s, decode_s, _ = serving_prediction(shape, weights, mode, requests, cluster)
            tokens = sum(wanted["max_tokens"] for wanted in requests)
            yield f"{label}, {count} requests: tokens/s", (tokens / (prompts_s + decode_s), "tokens/s")
            yield f"{label}, {count} requests: first token, p99", (1e3 * prompts_s, "ms")
            if weights == "bfloat16":
                full = one(32, 16, vocabulary=vocabulary, seed=0) * count
                *_, step_s = serving_prediction(shape, weights, mode, full, cluster)
                yield f"{label}, {count} requests: ms/step", (1e3 * step_s, "ms")
        if counts and weights == "bfloat16":
            yield f"{label}, alone, top-p: ms/token", (1e3 * decode_s_of_one(shape, mode, cluster), "ms")
            prompt = one(2048, 1, vocabulary=vocabulary, seed=2)
            prompts_s, *_ = serving_prediction(shape, weights, mode, prompt, cluster)
            yield f"{label}, prompts: tokens/s", (2048 / prompts_s, "tokens/s")


def decode_s_of_one(shape, mode, cluster):
    """Return the seconds of a step of one sequence; draws with top-p are one kernel, as greedy ones."""
    requests = one(32, 64, vocabulary=shape_of(shape, is_tiny=False).vocab_size, seed=3)
    return serving_prediction(shape, "bfloat16", mode, requests, cluster)[2]


def serving_prediction(shape, weights, mode, requests, cluster):
    """Return the seconds of all prompts, of all steps of decoding, and of one with all sequences."""
    prompts = [len(wanted["prompt"]) for wanted in requests]
    answers = [wanted["max_tokens"] for wanted in requests]

    def step(batch):
        return predict_decode(
            DecodeJob(
                model=shape_of(shape, is_tiny=False),
                batch=batch,
                context_tokens=round((sum(prompts) + sum(answers) / 2) / len(prompts)),
                prompt_tokens=round(sum(prompts) / len(prompts)),
                weight_bits=WEIGHT_BITS[weights],
                graphs=mode in (GRAPHS, COMPILED),
                compiled=mode == COMPILED,
            ),
            cluster,
        )

    whole = step(len(prompts))
    decode_s = sum(steps * step(batch).token_s for batch, steps in decode_segments(answers))
    return whole.prefill_s, decode_s, whole.token_s


def decode_segments(answers):
    """Return (answers in the making, steps) from the first step after the prompts to the last.

    An answer's first token comes with its prompt, so n tokens take n - 1 steps more.

    >>> decode_segments([4, 2, 4])
    [(3, 1), (2, 2)]
    """
    steps, found, done = sorted(answer - 1 for answer in answers), [], 0
    left = len(steps)
    for until, group in groupby(steps):
        if until > done:
            found.append((left, until - done))
        left, done = left - len(list(group)), until
    return found


def error_percent(predicted, measured):
    """Return how far a prediction is off, in percent of what was measured; above 0: too much.

    >>> round(error_percent(110.0, 100.0), 6)
    10.0
    """
    return 100 * (predicted / measured - 1)
