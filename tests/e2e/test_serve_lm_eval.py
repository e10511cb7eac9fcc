"""Stock lm-eval against `penstock serve` gives the figures of `penstock eval`, at 1 and at 16 requests."""

import asyncio

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.evaluation.evaluate import evaluate
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.tasks import load_tasks
from tests.made_tasks import own_cache, save_model, save_tasks
from tests.serving import serving

CONTEXT = 256
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


def theirs_of(model, files, *, chat=False):
    from lm_eval.evaluator import evaluate as ask

    try:
        return ask(
            model,
            load_tasks(files, EvaluationOptions()),
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        )
    finally:
        asyncio.set_event_loop(None)


def responses(results, task):
    return [response for sample in results["samples"][task] for (response,) in sample["resps"]]


@pytest.mark.parametrize("at_once", [1, 16])
def test_completions_give_the_same_figures(made, at_once):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder, files, server = made
    ours = ours_of(folder, files.values())
    theirs = theirs_of(
        LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="model",
            tokenizer=str(folder),
            add_bos_token=True,
            num_concurrent=at_once,
            max_length=CONTEXT + 1,
            max_retries=1,
        ),
        files.values(),
    )
    for task in files:
        for found, expected in zip(responses(ours, task), responses(theirs, task), strict=True):
            if isinstance(found, str):
                assert found == expected
            elif isinstance(found, float):
                assert found == pytest.approx(expected, abs=1e-4)
            else:
                assert found[0] == pytest.approx(expected[0], abs=1e-4)
                assert found[1] == expected[1]
    assert ours["results"]["made_choice"]["acc,none"] == theirs["results"]["made_choice"]["acc,none"]


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
    expected = responses(theirs_of(theirs, files, chat=True), "made_writing")
    assert responses(ours_of(folder, files, chat_template=True), "made_writing") == expected
    assert len(set(expected)) > 5
