"""Evaluations against lm-eval's own `hf` model: log-likelihoods to 1e-4, answers to the character."""

import json
import logging
import random

import numpy as np
import peft
import pytest
import torch
from tests.made_tasks import CHOICE, CLOZE, KINDS, WRITING, own_cache, save_model, save_tasks
from transformers import AutoModelForCausalLM

from penstock.core.errors import InputError, UsageError
from penstock.engine.config import EngineConfig
from penstock.engine.llm import LLM
from penstock.evaluation.evaluate import evaluate
from penstock.evaluation.options import EvaluationOptions
from penstock.evaluation.tasks import load_tasks

CONTEXT = 96
SAMPLED = {"log_samples": True, "bootstrap": 0}
SMALL = EngineConfig(device="cpu", block_size=4, max_sequences=16)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Data sets of tests leave nothing in the user's cache."""
    with own_cache(tmp_path_factory.mktemp("hf")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), context=CONTEXT)


def ours_of(folder, files, *, config=SMALL, adapter=None, **options):
    chosen = EvaluationOptions(**SAMPLED, **options)
    tasks = load_tasks(list(map(str, files)), chosen)
    with LLM(folder, config) as llm:
        return evaluate(llm, tasks, chosen, name="made", adapter=adapter)


def theirs_of(folder, files, *, chat=False, **options):
    """Return what lm-eval's own loop finds with its own model, and how many requests that model has cut."""
    from lm_eval.evaluator import evaluate as ask
    from lm_eval.models.huggingface import HFLM

    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=16, **options)
    cuts = []
    logger = logging.getLogger("lm_eval.models.huggingface")
    logger.addFilter(lambda record: cuts.append(record) if "exceeds model" in record.getMessage() else True)
    logger.setLevel(logging.WARNING)
    try:
        tasks = load_tasks(list(map(str, files)), EvaluationOptions())
        return ask(
            theirs,
            tasks,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=chat,
            fewshot_as_multiturn=chat,
        ), len(cuts)
    finally:
        logger.filters.clear()
        logger.setLevel(logging.NOTSET)


def check_samples(ours, theirs):
    """Compare each response of each question; return how many log-likelihoods and texts there were."""
    counts = {"numbers": 0, "texts": 0}
    for one, other in zip(ours, theirs, strict=True):
        assert one["prompt_hash"] == other["prompt_hash"]
        for (found,), (expected,) in zip(one["resps"], other["resps"], strict=True):
            if isinstance(expected, str):
                assert found == expected
                counts["texts"] += 1
                continue
            if not isinstance(expected, float):
                assert found[1] == bool(expected[1])
                found, expected = found[0], expected[0]
            assert found == pytest.approx(float(expected), abs=1e-4)
            counts["numbers"] += 1
    return counts


@pytest.fixture(scope="module")
def three_hundred(model, tmp_path_factory):
    files = save_tasks(tmp_path_factory.mktemp("tasks"), questions=60, words=60)
    return ours_of(model, files), *theirs_of(model, files)


@pytest.mark.parametrize("kind", KINDS)
def test_every_figure_is_that_of_lm_evals_own_model(three_hundred, kind):
    ours, theirs, _ = three_hundred
    assert len(ours["samples"][kind]) == 60
    counts = check_samples(ours["samples"][kind], theirs["samples"][kind])
    assert sum(counts.values()) == (240 if "choice" in kind or "shots" in kind else 60)
    for metric, value in theirs["results"][kind].items():
        if isinstance(value, float):
            assert ours["results"][kind][metric] == pytest.approx(value, rel=1e-4)


def test_what_is_longer_than_the_context_is_cut_and_counted(three_hundred):
    ours, _, num_cut = three_hundred
    assert ours["num_cut"] >= num_cut > 0  # theirs counts requests that differ in the last token once
    windows = [one for one in ours["samples"]["made_rolling"] if len(one["arguments"][0][0].split()) > 50]
    assert windows  # of some texts there is more than one window


def test_the_results_name_all_that_they_depend_on(three_hundred):
    ours, *_ = three_hundred
    assert ours["n-shot"] == {**dict.fromkeys(KINDS, 0), "made_shots": 3}
    assert ours["versions"] == dict.fromkeys(KINDS, 1.0)
    assert ours["config"]["fewshot_seed"] == 1234
    assert ours["config"]["bootstrap_iters"] == 0
    assert (ours["chat_template"], ours["max_length"]) == (None, CONTEXT)
    assert set(ours["task_hashes"]) == set(KINDS)
    json.dumps(ours)  # JSON values only


def test_with_the_chat_template_and_in_int8_the_prompts_are_theirs(model, tmp_path):
    files = save_tasks(tmp_path, questions=6)
    ours = ours_of(model, files, chat_template=True)
    theirs, _ = theirs_of(model, files, chat=True)
    for kind in KINDS:
        check_samples(ours["samples"][kind], theirs["samples"][kind])
    assert ours["chat_template"] == (model / "chat_template.jinja").read_text()
    assert len(ours["chat_template_sha"]) == 64

    rounded = ours_of(model, files, config=EngineConfig(device="cpu", weights="int8"))
    each = [
        [(sample["prompt_hash"], sample["resps"]) for sample in found["samples"]["made_cloze"]]
        for found in (rounded, ours_of(model, files))
    ]
    for (prompt, ((one,),)), (other_prompt, ((other,),)) in zip(*each, strict=True):
        assert prompt == other_prompt
        assert one[0] != other[0]
        assert one[0] == pytest.approx(other[0], rel=0.1)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
def test_an_adapter_answers_as_in_lm_evals_own_model(model, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(model)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    files = save_tasks(tmp_path, questions=5)[:2]
    config = EngineConfig(device="cpu", adapters={"mine": tmp_path / "adapter"})
    ours = ours_of(model, files, config=config, adapter="mine")
    theirs, _ = theirs_of(model, files, peft=str(tmp_path / "adapter"))
    plain = ours_of(model, files)
    for kind in ("made_choice", "made_cloze"):
        check_samples(ours["samples"][kind], theirs["samples"][kind])
        assert ours["samples"][kind][0]["resps"] != plain["samples"][kind][0]["resps"]


def test_a_question_costs_its_context_once(tmp_path):
    """Of questions of 4 choices with examples, the engine computes the prompts and the ends of choices."""
    (file,) = [one for one in save_tasks(tmp_path, questions=12) if one.stem == "made_shots"]
    task = json.loads(file.read_text())
    task["fewshot_config"] = {"sampler": "first_n"}
    file.write_text(json.dumps(task))
    options = EvaluationOptions()
    with LLM(save_model(tmp_path / "long", context=1024), SMALL) as llm:
        before = llm.thread.stats().counts.tokens
        found = evaluate(llm, load_tasks([str(file)], options), options, name="made")
        computed = llm.thread.stats().counts.tokens - before
    assert found["num_cut"] == 0
    prompts = 12 * 4 * 100  # a prompt has more than 100 tokens
    assert computed < prompts / 3


def test_global_generators_are_left_as_they_were(model, tmp_path):
    files = save_tasks(tmp_path, questions=4)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    ours_of(model, files[:1])
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def of_docs(folder, kind, *docs, **more):
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    file = folder / "task.json"
    task = {"task": "odd", **kind, "dataset_kwargs": {"data_files": "docs.jsonl"}, **more}
    file.write_text(json.dumps(task))
    return [file]


DOC = {"question": "the dam", "choices": ["a", "the"], "label": 0}


def test_sampled_answers_are_drawn_by_seed(model, tmp_path):
    settings = {"do_sample": True, "temperature": 1.5, "until": [], "max_gen_toks": 12}
    files = of_docs(tmp_path, WRITING, DOC, DOC, generation_kwargs=settings)
    first, again = ([one["resps"] for one in ours_of(model, files)["samples"]["odd"]] for _ in range(2))
    assert first == again
    assert first[0] != first[1]


@pytest.mark.parametrize(
    ("kind", "doc", "error", "message"),
    [
        (CLOZE, {**DOC, "choices": [""]}, InputError, "A continuation has no tokens.*Correct the task"),
        (CLOZE, {**DOC, "choices": ["valve " * 200]}, InputError, "longer than the model's context of 96"),
        (CHOICE, {**DOC, "label": 7}, UsageError, "cannot be set up"),
        (
            {**WRITING, "generation_kwargs": {"until": ["a"], "max_gen_toks": 5, "num_beams": 4}},
            DOC,
            UsageError,
            r"settings that the engine does not have \(got {'num_beams': 4}\).*Known: temperature",
        ),
        (
            {**WRITING, "generation_kwargs": {"until": ["a"], "max_gen_toks": 96}},
            DOC,
            UsageError,
            "asks for answers of 96 tokens, and the model's context has 96.*Lower max_gen_toks",
        ),
        (
            {**CLOZE, "doc_to_text": "{{nothing}}"},
            DOC,
            UsageError,
            "cannot be set up.*'nothing' is undefined",
        ),
    ],
)
def test_questions_that_cannot_be_asked(kind, doc, error, message, model, tmp_path):
    with pytest.raises(error, match=message):
        ours_of(model, of_docs(tmp_path, kind, doc))


def test_a_model_without_a_chat_template(tmp_path):
    folder = save_model(tmp_path / "plain")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match=r"no chat template.*Leave --chat-template out"):
        ours_of(folder, of_docs(tmp_path, CLOZE, DOC), chat_template=True)
