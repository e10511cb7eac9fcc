"""The summary of a run: how it ended, its figures and its tables, whatever its records are."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.obs.metric_names import METRICS
from penstock.obs.run_data.summary import summary_of
from tests.examples import examples
from tests.run_records import data_of

CONFIG = {
    "run": {"dir": "runs/first", "steps": 60},
    "model": {"model_type": "llama", "vocab_size": 1024, "num_hidden_layers": 3},
    "data": {"corpora": {"web": {"path": "/c/web", "weight": None}}, "sequence_length": 128},
    "compute": "float32",
}


def start(step, ranks, **more):
    return {"event": "start", "step": step, "ranks": ranks, "time": "2026-11-21T03:49:55+00:00", **more}


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


def figures(run, config=CONFIG):
    found = summary_of(data_of(run), config)["figures"]
    return {figure["title"]: f"{figure['value']} {figure['note']}".strip() for figure in found}


def tables(run):
    return {table["title"]: table["rows"] for table in summary_of(data_of(run), CONFIG)["tables"]}


def ended(run):
    return summary_of(data_of(run), CONFIG)["ended"]


def test_key_figures_are_those_of_the_records_and_each_is_explained():
    assert figures(records()) == {
        "steps": "60 of 60, 30.0 s of training",
        "tokens": "92,160 1,536 a step",
        "final training loss": "6.400 6.420 over the last 5 steps",
        "validation loss": "7.000 \u2192 6.500 best of 6: 6.500",
        "median tokens/s": "3,072 3.07k to 3.07k in 80% of steps",
        "median MFU": "25% 25% to 25% in 80% of steps",
        "median data-wait share": "1% 1% to 1% in 80% of steps",
        "peak memory": "3.0 GiB of the first process",
    }
    found = summary_of(data_of(records()), CONFIG)
    assert (
        found["about"]
        == "llama \u00b7 layers 3 \u00b7 vocabulary 1,024 \u00b7 rows of 128 tokens \u00b7 float32"
    )
    assert all(METRICS[figure["metric"]][1] in figure["meaning"] for figure in found["figures"])


def test_an_unusual_end_is_named():
    stop = {"event": "early_stop", "step": 2, "best_step": 1, "best_loss": 5.0, "waited": 3}
    run = [step_record(1), step_record(2)]
    assert ended(run) == ""
    assert ended([*run, step_record(3, loss=float("nan"))]) == "diverged at step 3"
    assert ended([*run, stop]) == "stopped early, best at step 1"
    assert ended([*run, stop, step_record(3)]) == ""


def test_each_start_has_a_row_with_what_it_changed():
    run = [
        *records(20, ranks=(2,)),
        start(20, 1, changes={"optim.learning_rate": [0.1, 0.05], "plan": [None, True]}),
    ]
    run += [step_record(step, tokens_per_s=1000.0) for step in range(21, 31)]
    assert [list(row) for row in tables(run)["Starts"]] == [
        ["0", "2", "2026-11-21 03:49:55", "20", "3,072", "\u2013", ""],
        [
            "20",
            "1",
            "2026-11-21 03:49:55",
            "10",
            "1,000",
            "\u2013",
            "optim.learning_rate 0.1 \u2192 0.05; plan \u2013 \u2192 true",
        ],
    ]


def test_of_hundreds_of_starts_the_last_are_shown():
    run = [record for n in range(1, 302) for record in (start(n - 1, 1), step_record(n))]
    (found,) = [table for table in summary_of(data_of(run), CONFIG)["tables"] if table["title"] == "Starts"]
    assert (len(found["rows"]), found["note"]) == (200, "The 101 starts before these are left out.")


def test_mfu_is_said_with_its_peak_and_of_the_steps_that_have_it():
    def measured(step, peak):
        return start(step, 2, device="cpu", threads=1, **({} if peak is None else {"peak_flops": peak}))

    rows = [step_record(step, mfu=0.9 if step <= 10 else 0.4) for step in range(1, 21)]
    assert "of 1 TFLOP/s" in figures([measured(0, 1e12), *rows])["median MFU"]
    changed = figures([measured(0, 1e12), *rows[:10], measured(10, 3e12), *rows[10:]])
    assert changed["median MFU"] == "40% of 3 TFLOP/s, from step 10 on"
    unknown = figures([measured(0, 1e12), *rows[:10], measured(10, None), *rows[10:]])
    assert unknown["median MFU"] == "\u2013 the peak could not be measured without other load"


def test_learned_tokens_are_counted_where_not_all_are_learned():
    run = [step_record(n, tokens=100 * n, labels=30) for n in range(1, 11)]
    assert figures(run)["learned tokens"] == "300.0 30% of the tokens"
    assert "learned tokens" not in figures([step_record(n, tokens=100 * n, labels=99) for n in range(1, 11)])


@pytest.mark.parametrize(("loss", "title"), [("dpo", "pairs of answers"), ("kto", "answers")])
def test_pairs_are_not_counted_as_learned_tokens(loss, title):
    run = [step_record(n, labels=4, reward_margin=0.5, reward_accuracy=1.0) for n in range(1, 11)]
    assert figures(run, {"tune": {"loss": loss}})[title] == "40 4 a step"


def test_tokens_by_corpus_are_a_table_with_more_than_one_corpus():
    two = [step_record(1, corpus_tokens={"code": 100, "web": 300})]
    assert tables(two)["Tokens by corpus"] == [("web", "300", "75.0%"), ("code", "100", "25.0%")]
    assert "Tokens by corpus" not in tables(records())


def test_the_last_validation_is_shown_corpus_by_corpus_and_in_all():
    validation = {
        "validation_loss": 6.5,
        "validation_perplexity": 665.1,
        "corpus_validation_loss": {"a": 6.25, "c": 6.75},
        "corpus_perplexity": {"a": 518.0, "c": 854.0},
        "corpus_bits_per_byte": {"a": 2.125},
    }
    run = [
        step_record(1),
        {"step": 1, **validation, "validation_loss": 9.0},
        step_record(2),
        {"step": 2, **validation},
    ]
    assert tables(run)["Held-out text, after step 2"] == [
        ["a", "6.250", "518.0", "2.125"],
        ["c", "6.750", "854.0", "\u2013"],
        ["all", "6.500", "665.1", "\u2013"],
    ]
    one = {"step": 1, "validation_loss": 6.5, "corpus_validation_loss": {"a": 6.5}}
    assert tables([step_record(1), one])["Held-out text, after step 1"] == [
        ["a", "6.500", "\u2013", "\u2013"]
    ]
    assert not [title for title in tables(records()) if title.startswith("Held-out")]


def test_scores_of_tasks_are_shown_first_and_last_with_their_errors():
    scored = {"event": "evaluation", "step": 1, "task_scores": {"a/acc": 0.5, "b/acc": 0.25}}
    later = {"event": "evaluation", "step": 2, "task_scores": {"a/acc": 0.75}, "task_stderrs": {"a/acc": 0.1}}
    assert tables([step_record(1), scored, step_record(2), later])["Tasks"] == [
        ("a/acc", "0.5000 (step 1)", "0.7500 (step 2)", "0.1000", "2"),
        ("b/acc", "0.2500 (step 1)", "0.2500 (step 1)", "\u2013", "1"),
    ]


def test_traffic_is_shown_by_axis_with_its_mean_rate():
    sent = {
        "event": "traffic",
        "step": 2,
        "sent_bytes": {"shard": 2**20, "replicate": 2**21},
        "network_axes": ["replicate"],
    }
    assert tables([step_record(1), step_record(2), sent])["Traffic of a step, counted at step 2"] == [
        ("replicate", "2.0 MiB", "network", "33.6Mbit/s"),
        ("shard", "1.0 MiB", "within a machine", "16.8Mbit/s"),
    ]


def test_skipped_steps_are_listed_and_hundreds_are_cut_to_the_last():
    skipped = [{"event": "skipped", "step": n, "why": "The loss is nan"} for n in range(2, 202)]
    assert tables([step_record(1), skipped[0]])["1 step not taken"] == [("2", "The loss is nan")]
    assert len(tables([step_record(1), *skipped])["200 steps not taken, the last 50"]) == 50


def test_kernels_of_the_last_start_have_their_lead():
    kernels = {
        "attention 2x8": {"kernel": "b", "us": {"a": 30.0, "b": 20.0, "c": 40.0}, "out": {"d": "wrong"}},
        "loss 4": {"kernel": "x"},
    }
    assert tables([start(0, 1, kernels=kernels), step_record(1)])["Kernels of the last start"] == [
        ("attention 2x8", "b", "20 us", "1.50 times", "a 30 us; c 40 us; d out: wrong"),
        ("loss 4", "x", "\u2013", "\u2013", ""),
    ]


@pytest.mark.parametrize(
    "run",
    [
        [],
        [start(0, 1)],
        [step_record(1)],
        [{"step": 5, "loss": 3.0}],
        [step_record(1, loss=None, grad_norm=None)],
        [step_record(n, loss=1e30**n, grad_norm=10.0**n) for n in range(1, 9)],
        [step_record(n, tokens_per_s=0.0, learning_rate=0.0, grad_norm=0.0) for n in range(1, 30)],
        [start(0, 1), *(step_record(n) for n in range(1000, 1200)), start(1199, 2), step_record(1200)],
        [step_record(1), {"event": "traffic", "step": 1, "sent_bytes": [1], "network_axes": 3}],
    ],
    ids=[
        "nothing",
        "no step",
        "one step",
        "loss only",
        "diverged at once",
        "exploding",
        "zeros",
        "rewound tail",
        "odd traffic",
    ],
)
def test_odd_runs_have_a_summary(run):
    json.dumps(summary_of(data_of(run), {}), allow_nan=False)


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "ranks",
    "time",
    "threads",
    "device",
    "peak_flops",
    "changes",
    "kernels",
    "sent_bytes",
    "network_axes",
    "best_step",
)


@given(st.dictionaries(st.sampled_from(FIELDS), ODD), st.sampled_from(["start", "traffic", "early_stop"]))
@examples(200)
def test_no_value_of_an_event_breaks_the_summary(fields, event):
    run = [step_record(1), {"event": event, "step": 1, **fields}]
    json.dumps(summary_of(data_of(run), CONFIG), allow_nan=False)
