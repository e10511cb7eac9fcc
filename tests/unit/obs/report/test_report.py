"""The page: what it says of a run, what it leaves out, and that nothing in a file can become markup."""

import base64
import hashlib
import re
import subprocess
import sys

import pytest

from penstock.core.errors import PenstockError
from penstock.obs.metric_names import METRICS
from penstock.obs.report.report import render
from tests.run_records import data_of
from tests.unit.obs.html_elements import Elements, charts_of, layers_of

CONFIG = {
    "run": {"dir": "runs/first", "steps": 60},
    "model": {"model_type": "llama", "vocab_size": 1024, "num_hidden_layers": 3},
    "data": {"corpora": {"web": {"path": "/c/web", "weight": None}}, "sequence_length": 128},
    "compute": "float32",
}


def start(step, ranks):
    return {"event": "start", "step": step, "ranks": ranks, "time": "2026-11-21T03:49:55+00:00"}


def step_record(step, **changes):
    return {
        "step": step,
        "tokens": 1536 * step,
        "loss": 7.0 - step / 100,
        "grad_norm": 1.0,
        "learning_rate": 3e-4,
        "step_s": 0.5,
        "tokens_per_s": 3072.0,
        "data_wait_share": 0.01,
        "mfu": 0.25,
        "memory_bytes": 3 * 2**30,
        "corpus_tokens": {"web": 1536 * step},
    } | changes


def records(number=60, *, ranks=(2,)):
    """Yield a run that starts anew, on the next number of ranks, after each equal part of it."""
    part = number // len(ranks)
    for step in range(1, number + 1):
        if (step - 1) % part == 0 and (step - 1) // part < len(ranks):
            yield start(step - 1, ranks[(step - 1) // part])
        yield step_record(step)
        if step % 10 == 0:
            yield {"step": step, "validation_loss": 7.1 - step / 100}


def page(run=None, config=CONFIG, **others):
    return render(data_of(records() if run is None else run), config, name="first", **others)


def words(text):
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def test_the_page_is_well_formed_and_needs_nothing_from_outside():
    text = page(records(ranks=(2, 1)))
    elements = Elements(re.sub("<!doctype html>", "", text)).found
    sources = [a.get("src") or a.get("href") for _, a in elements if "src" in a or "href" in a]
    assert sources == ["data:,"]
    assert re.findall(r"https?://\S+|@import|url\(", text) == ["https://github.com/leeoniya/uPlot"], (
        "a comment"
    )
    ids = [attributes["id"] for _, attributes in elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_policy_of_the_page_lets_its_own_script_run():
    text = page()
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(hashes) == 2
    assert "script-src 'sha256-{}' 'sha256-{}';".format(*hashes) in text


def test_the_page_carries_the_licence_of_the_library_in_it():
    assert "Copyright (c) 2022 Leon Sorokin" in page()


def test_the_same_records_are_the_same_bytes():
    assert page(records(2000)) == page(records(2000))


def test_key_figures_are_those_of_the_records():
    said = words(page())
    for figure in (
        "steps 60 of 60, 30.0 s of training",
        "tokens 92,160 1,536 a step",
        "final training loss 6.400",
        "validation loss 7.000 → 6.500 best of 6: 6.500",
        "median tokens/s 3,072",
        "median MFU 25%",
        "median data-wait share 1%",
        "peak memory 3.0 GiB",
    ):
        assert figure in said


@pytest.mark.parametrize(
    ("config", "last", "said"),
    [
        (CONFIG, 60, "finished"),
        (CONFIG | {"run": {"steps": 80}}, 60, "60 of 80 steps so far"),
        ({}, 60, "60 steps so far"),
        (CONFIG, 61, "diverged at step 61"),
    ],
)
def test_the_outcome_is_in_the_title(config, last, said):
    run = [*records(), *(step_record(n, loss=float("nan")) for n in range(61, last + 1))]
    assert f"first {said}" in words(page(run, config))


def test_a_change_of_the_number_of_processes_is_marked_and_tabled():
    text = page(records(ranks=(2, 1, 1)))
    assert "2 → 1 processes at step 20" in words(text)
    marks = [(mark["x"], mark["text"], mark["isLabelled"]) for mark in charts_of(text)["loss"]["marks"]]
    assert marks == [(20, "2 → 1 processes", True), (40, "restarted", False)]
    assert not any(mark["isLabelled"] for mark in charts_of(text)["learning-rate"]["marks"])
    assert "20 1 2026-11-21 03:49:55 20 3,072" in words(text)


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_is_explained(metric):
    assert f"<dt><code>{metric}</code>" in page()
    assert METRICS[metric][1].replace("'", "&#x27;") in page()


def test_references_are_lines_in_the_loss_chart():
    with_line = charts_of(page(references={"unigram entropy": 6.31}))
    assert with_line["loss"]["levels"] == [["unigram entropy", 6.31]]
    assert charts_of(page())["loss"]["levels"] == []


def test_tokens_by_corpus_appear_with_more_than_one_corpus():
    two = [step_record(1, corpus_tokens={"web": 300, "code": 100})]
    assert "web 300 75.0% code 100 25.0%" in words(page(two))
    assert "Tokens by corpus" not in page()


def test_names_from_files_cannot_become_markup():
    evil = '<img src=x onerror="alert(1)">$name'
    run = [
        start(0, 1) | {"time": evil},
        step_record(1, corpus_tokens={evil: 1, "b": 2}),
    ]
    config = {"run": {"dir": evil}, "model": {"model_type": evil}, evil: {evil: evil}}
    text = render(data_of(run), config, name=evil, references={evil: 6.0})
    assert "img" not in {tag for tag, _ in Elements(text.replace("<!doctype html>", "")).found}
    assert text.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;$name") >= 6


def test_the_recipe_is_on_the_page_without_its_empty_keys():
    text = page()
    assert "[data.corpora.web]\npath = &quot;/c/web&quot;" in text
    assert "weight =" not in text


@pytest.mark.parametrize(
    "run",
    [
        [step_record(1)],
        [{"step": 5, "loss": 3.0}],
        [step_record(1, loss=None, grad_norm=None)],
        [step_record(n, loss=1e30**n, grad_norm=10.0**n) for n in range(1, 9)],
        [step_record(n, tokens_per_s=0.0, learning_rate=0.0, grad_norm=0.0) for n in range(1, 30)],
        [step_record(n, loss=-1.0) for n in range(1, 30)],
        [start(0, 1), *(step_record(n) for n in range(1000, 1200)), start(1199, 2), step_record(1200)],
    ],
    ids=["one step", "loss only", "diverged at once", "exploding", "zeros", "negative", "rewound tail"],
)
def test_odd_runs_still_have_a_page(run):
    assert "</html>" in page(run)


def test_a_chart_without_a_value_is_left_out():
    assert "grad-norm" in charts_of(page())
    assert "grad-norm" not in charts_of(page([{"step": 1, "loss": 3.0}]))


def test_curves_are_the_values_of_the_records_by_step():
    found = layers_of(page(), "loss")
    assert found["training"]["x"] == [*range(1, 61)]
    assert found["training"]["y"][:2] == [6.99, 6.98]
    assert found["training"]["means"][0]["name"] == "mean of 5 steps"
    assert (found["validation"]["x"], found["validation"]["y"][-1]) == ([10, 20, 30, 40, 50, 60], 6.5)


def test_a_spike_makes_the_axis_logarithmic():
    spike = [step_record(n, grad_norm=100.0 if n == 30 else 1.0) for n in range(1, 61)]
    assert charts_of(page(spike))["grad-norm"]["log"]
    assert not charts_of(page())["grad-norm"]["log"]


def test_lines_that_are_no_records_are_admitted():
    assert "1 line that are no records are left out" in page([*records(), {"event": "coffee"}])


def test_a_run_without_steps_is_an_error():
    with pytest.raises(PenstockError, match="has not recorded a step yet"):
        page([start(0, 1)])


def test_a_long_run_has_a_page_under_half_a_megabyte():
    # 30,000 steps have as many points as a million: the page does not grow.
    assert len(page(records(30_000, ranks=(1, 2) * 200))) < 500_000


def test_drawing_a_page_imports_no_torch():
    code = "import sys, penstock.cli.report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def measured_start(step, peak, **more):
    known = {} if peak is None else {"peak_flops": peak}
    return start(step, 2) | {"device": "cpu", "threads": 1, **known, **more}


def test_mfu_is_said_with_its_peak_and_of_the_steps_that_have_it():
    rows = [step_record(step, mfu=0.9 if step <= 10 else 0.4) for step in range(1, 21)]
    same = words(page([measured_start(0, 1e12), *rows]))
    assert "of 1 TFLOP/s" in same
    changed = words(page([measured_start(0, 1e12), *rows[:10], measured_start(10, 3e12), *rows[10:]]))
    assert "median MFU 40%" in changed
    assert "from step 10 on" in changed
    unknown = words(page([measured_start(0, 1e12), *rows[:10], measured_start(10, None), *rows[10:]]))
    assert "median MFU \u2013 the peak could not be measured without other load" in unknown


def test_what_a_start_changed_in_the_recipe_is_in_its_row_and_at_its_mark():
    rows = [step_record(step) for step in range(1, 21)]
    changes = {"optim.learning_rate": [0.1, 0.05], "plan": [None, True]}
    text = page([start(0, 2), *rows[:10], start(10, 2) | {"changes": changes}, *rows[10:]])
    assert "optim.learning_rate 0.1 → 0.05; plan \u2013 → true" in text
    assert charts_of(text)["loss"]["marks"][0]["text"] == "learning_rate 0.1 → 0.05, 1 more"


def test_bits_per_byte_have_a_chart_of_their_own_where_they_are_known():
    rows = [step_record(1), {"step": 1, "validation_loss": 2.0, "validation_bits_per_byte": 1.5}]
    assert "bits-per-byte" in charts_of(page(rows))
    assert "bits-per-byte" not in charts_of(page())
