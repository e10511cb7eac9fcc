"""What the page of a run reads: which metrics of several runs are compared, and answers by prompt."""

import pytest

from penstock.obs.run_data.page_json import answers_json, comparison_json
from tests.run_records import data_of, reported


def run(*, peak=1e12, ranks=1, threads=2, vocabulary=64, **others):
    start = {
        "event": "start",
        "step": 0,
        "ranks": ranks,
        "time": "2026-11-21T03:49:55+00:00",
        "device": "cpu",
    }
    start |= {"threads": threads} | ({} if peak is None else {"peak_flops": peak})
    recipe = {"model": {"vocab_size": vocabulary}}
    return reported([start, {"step": 1, "loss": 3.0, "mfu": 0.4}], recipe, **others)


def left_out(*runs):
    found = comparison_json([(one.found, one.data, one.recipe) for one in runs])
    assert bool(found["notes"]) is bool(found["left_out"])
    return found["left_out"]


@pytest.mark.parametrize(
    ("first", "second", "compared"),
    [
        ({"peak": 1e12}, {"peak": 1.05e12}, True),
        ({"peak": 1e12}, {"peak": 2e12, "ranks": 2}, True),  # twice the ranks, the same cores
        ({"peak": 1e12, "threads": 1, "ranks": 2}, {"peak": 1e12, "threads": 2, "ranks": 1}, True),
        ({"peak": 1e12}, {"peak": 2e12}, False),
        ({"peak": 1e12}, {"peak": None}, False),
    ],
)
def test_mfu_is_compared_where_it_is_a_share_of_the_same_peak(first, second, compared):
    assert left_out(run(**first), run(**second)) == ([] if compared else ["mfu"])


def test_losses_per_token_are_compared_within_one_tokenizer():
    assert left_out(run(tokenizer=b"a"), run(tokenizer=b"b")) == ["loss", "validation_loss"]
    assert left_out(run(tokenizer=b"a"), run(tokenizer=b"a", vocabulary=128)) == []


def test_without_tokenizers_the_sizes_of_vocabularies_tell_runs_apart():
    assert left_out(run(vocabulary=400), run(vocabulary=800)) == ["loss", "validation_loss"]


def samples(step, *answers, finish="stop"):
    listed = [{"prompt": prompt, "answer": answer, "finish": finish} for prompt, answer in answers]
    return {"event": "samples", "step": step, "answers": listed}


def test_answers_are_by_prompt_and_one_that_was_cut_says_so():
    records = [
        samples(0, ("Who?", "abc")),
        {"step": 1, "loss": 3.0},
        samples(1, ("Who?", "me"), finish="length"),
    ]
    assert answers_json(data_of(records)) == {
        "steps": [0, 1],
        "prompts": [
            {
                "prompt": "Who?",
                "reference": None,
                "answers": [
                    {"step": 0, "answer": "abc", "cut": False},
                    {"step": 1, "answer": "me", "cut": True},
                ],
            }
        ],
    }


def test_of_very_many_samples_some_are_kept_the_first_and_the_last_among_them():
    records = [
        one for n in range(1, 1001) for one in ({"step": n, "loss": 1.0}, samples(n, ("Who?", f"a{n}")))
    ]
    steps = answers_json(data_of(records))["steps"]
    assert len(steps) <= 256
    assert (steps[0], steps[-1]) == (1, 1000)
