"""Stock lm-eval against `penstock serve` gives the figures of `penstock eval`, with one request and many."""

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.evaluation.evaluate import evaluate
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.tasks import load_tasks
from tests.made_tasks import KINDS, own_cache, save_model, save_tasks
from tests.serving import serving

CONTEXT = 256
PATIENCE_S = 240.0
TASKS = ["made_choice", "made_rolling", "made_writing"]
SAMPLED = {"log_samples": True, "bootstrap": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with tasks, a model and its server."""
    folder = tmp_path_factory.mktemp("served")
    save_model(folder / "model", context=CONTEXT)
    files = {path.stem: str(path) for path in save_tasks(folder, questions=10, words=60)}
    with own_cache(tmp_path_factory.mktemp("hf")), serving(folder / "model") as server:
        yield folder / "model", files, server


def ours_of(folder, files, **options):
    chosen = EvaluationOptions(**SAMPLED, **options)
    with LLM(folder, EngineConfig(device="cpu")) as llm:
        return evaluate(llm, load_tasks(files, chosen), chosen, name="made")


def theirs_of(model, files):
    from lm_eval.evaluator import evaluate as ask

    try:
        return ask(
            model,
            load_tasks(files, EvaluationOptions()),
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
        )
    finally:
        asyncio.set_event_loop(None)


def responses(results, task):
    return [response for sample in results["samples"][task] for (response,) in sample["resps"]]


COMMANDS = """
import json, sys
from functools import partial
import lm_eval, lm_eval.tasks
from lm_eval.__main__ import cli_evaluate
lm_eval.simple_evaluate = partial(lm_eval.simple_evaluate, bootstrap_iters=0)
lm_eval.tasks.TaskManager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
for sys.argv in json.load(sys.stdin):
    cli_evaluate()
"""
"""Runs the `lm_eval` command with each line of words; loading it once saves 10 s for each more.

It draws no 100,000 samples of the questions for standard errors, which nothing here compares, and does not
read the 14,000 files of lm-eval's own tasks, of which nothing is asked.
"""


def test_the_command_gives_the_same_figures_with_1_and_16_requests_at_once(made, tmp_path):
    folder, files, server = made
    for task in TASKS:  # the command reads files of this name only; JSON is YAML
        shutil.copy(files[task], tmp_path / f"{task}.yaml")
    shutil.copy(folder.parent / "questions.jsonl", tmp_path)
    model = f"model=model,base_url={server.url}/v1/completions,tokenizer={folder},add_bos_token=True"
    commands = [
        [
            *("lm_eval", "--model", "local-completions", "--log_samples", "--output_path", str(at_once)),
            *("--tasks", ",".join(f"{task}.yaml" for task in TASKS)),
            *("--model_args", f"{model},max_length={CONTEXT + 1},max_retries=1,num_concurrent={at_once}"),
        ]
        for at_once in (1, 16)
    ]
    variables = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input=json.dumps(commands),
        cwd=tmp_path,
        env={**os.environ, **variables},
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert run.returncode == 0, run.stderr
    ours = ours_of(folder, [files[task] for task in TASKS])
    for at_once in (1, 16):
        (results,) = tmp_path.glob(f"{at_once}/*/results_*.json")
        theirs = json.loads(results.read_text())
        assert theirs["config"]["model_args"]["num_concurrent"] == at_once
        for task in TASKS:
            for metric in (f"{each['metric']},none" for each in KINDS[task]["metric_list"]):
                figure = theirs["results"][task][metric]
                assert figure == pytest.approx(ours["results"][task][metric], rel=1e-4)
            (samples,) = tmp_path.glob(f"{at_once}/*/samples_{task}_*.jsonl")
            found = responses({"samples": {task: map(json.loads, samples.read_text().splitlines())}}, task)
            for found_one, expected in zip(found, responses(ours, task), strict=True):
                if isinstance(expected, str):
                    assert found_one == expected
                elif isinstance(expected, float):
                    assert float(found_one) == pytest.approx(expected, abs=1e-4)
                else:  # log-likelihood, and whether the model would say it; in the file as text
                    assert float(found_one[0]) == pytest.approx(expected[0], abs=1e-4)
                    assert found_one[1] == str(expected[1])


@pytest.mark.parametrize("at_once", [1, 16])
def test_conversations_give_the_same_answers(made, at_once):
    from lm_eval.models.openai_completions import LocalChatCompletion

    folder, files, server = made
    files = [files["made_writing"]]
    theirs = LocalChatCompletion(
        base_url=f"{server.url}/v1/chat/completions",
        model="model",
        num_concurrent=at_once,
        max_length=CONTEXT,
        eos_string="<|endoftext|>",
        max_retries=1,
    )
    expected = responses(theirs_of(theirs, files), "made_writing")
    assert responses(ours_of(folder, files, chat_template=True), "made_writing") == expected
    assert len(set(expected)) > 5
