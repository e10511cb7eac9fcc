"""Evaluate a model on tasks: lm-eval asks and judges, our engine answers; results in lm-eval's format."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from penstock import __version__
from penstock.core import clock
from penstock.core.errors import AnswerFailed, InputError, PenstockError, UsageError
from penstock.engine.llm import LLM
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.seeds import SEEDS, seeded
from penstock.evaluation.tasks import TaskDict

Results = dict[str, Any]  # Any: JSON values, as lm-eval writes them


def evaluate(
    llm: LLM,
    tasks: TaskDict,
    options: EvaluationOptions,
    *,
    name: str,
    adapter: str | None = None,
    weights: str = "stored",
    on_progress: Callable[[str, int, int], None] = lambda _what, _done, _all: None,
) -> Results:
    """Return the results of a model on tasks from `load_tasks`, as JSON values.

    Args:
        name: what the results call the model.
        adapter: name of a LoRA adapter of the engine.
        weights: format of the engine's weights, for the results.
        on_progress: called with what is computed, how many are done, and of how many.

    Raises:
        UsageError: the options do not fit the model or a task.
        InputError: a question or answer that a task cannot handle.
        AnswerFailed: the engine failed.
    """
    from penstock.evaluation.language_model import EngineModel  # with lm-eval

    for task in tasks["tasks"].values():
        task.set_fewshot_seed(seed=options.fewshot_seed)  # the same examples each time
    text_processor = llm.text_processor.of(adapter)
    template = text_processor.template.source
    if options.chat_template and template is None:
        raise UsageError(
            "The model has no chat template, so questions cannot be written as messages",
            fix="Leave --chat-template out, or put chat_template.jinja into its folder.",
        )
    began, started = clock.unix_seconds(), clock.monotonic()
    model = EngineModel(
        llm,
        adapter=adapter,
        max_gen_toks=options.max_gen_toks,
        seed=SEEDS["torch_seed"],
        on_progress=on_progress,
    )
    try:
        with seeded(), _torch_seeded():
            found = _run(model, tasks, options)
    finally:
        model.close()
    samples = found.pop("samples", None)
    if options.log_samples:
        found["samples"] = samples
    used = template if options.chat_template else None
    results = {
        **found,
        "config": {
            "model": "penstock",
            "model_args": {"path": name, "adapter": adapter, "weights": weights},
            "adapter": adapter,
            "weights": weights,
            "limit": options.limit,
            "bootstrap_iters": options.bootstrap,
            "max_gen_toks": options.max_gen_toks,
            **SEEDS,
            "fewshot_seed": options.fewshot_seed,
        },
        "date": began,
        "penstock_version": __version__,
        "lm_eval_version": version("lm_eval"),
        "torch_version": torch.__version__,
        "model_source": "penstock",
        "model_name": name,
        "system_instruction": options.system,
        "system_instruction_sha": _hash(options.system),
        "fewshot_as_multiturn": options.chat_template and options.multiturn,
        "chat_template": used,
        "chat_template_sha": _hash(used),
        "tokenizer_hash": text_processor.tokenizer.fingerprint,
        "max_length": model.max_length,
        "num_cut": model.num_cut,
        "num_without_system": model.num_without_system,
        "task_hashes": _task_hashes(samples),
        "total_evaluation_time_seconds": str(clock.monotonic() - started),
    }
    return dict(_plain(results))


def _run(model: Any, tasks: TaskDict, options: EvaluationOptions) -> Results:
    from lm_eval.evaluator import evaluate as ask

    try:
        with redirect_stdout(sys.stderr):  # lm-eval prints how far its standard errors are
            found = ask(
                lm=model,
                task_dict=tasks,
                limit=options.limit,
                bootstrap_iters=options.bootstrap,
                log_samples=True,  # for the hashes of tasks
                system_instruction=options.system,
                apply_chat_template=options.chat_template,
                fewshot_as_multiturn=options.chat_template and options.multiturn,
            )
    except PenstockError:
        raise
    except Exception as error:  # of a task's templates, functions and metrics, whatever it is
        raise InputError(
            f"A task failed ({type(error).__name__}: {' '.join(str(error).split())[:300]})",
            fix="Correct its file or data; `penstock --debug eval` shows where.",
        ) from error
    if found is None:
        raise AnswerFailed("lm-eval returned no results: this process is not its first rank")
    return dict(found)


@contextmanager
def _torch_seeded() -> Iterator[None]:
    """Context manager: as `seeded`, for torch's generator of the CPU; tasks draw from no other."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(SEEDS["torch_seed"])
    try:
        yield
    finally:
        torch.set_rng_state(state)


def _hash(text: str | None) -> str | None:
    from lm_eval.utils import hash_string

    return None if text is None else str(hash_string(text))


def _task_hashes(samples: Any) -> dict[str, str]:
    """Return lm-eval's hash of each task's questions, prompts and targets."""
    from lm_eval.utils import hash_string

    return {
        task: hash_string("".join(one["doc_hash"] + one["prompt_hash"] + one["target_hash"] for one in each))
        for task, each in (samples or {}).items()
    }


def _plain(value: Any) -> Any:
    """Return JSON values: lm-eval's results have numpy's numbers, sets and functions among them."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        return value.item()
    return value if value is None or isinstance(value, str | int | float) else str(value)
