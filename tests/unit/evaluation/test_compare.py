"""Differences of results: paired where the samples are there, and cautions where they are no fair pair."""

import json
import math
import statistics

import pytest

from penstock.core.errors import InputError
from penstock.evaluation.compare import cautions, differences, read_results


def results_of(values, *, samples=True, **more):
    mean = statistics.fmean(values)
    stderr = statistics.stdev(values) / math.sqrt(len(values))
    found = {
        "results": {
            "mine": {"name": "mine", "sample_len": len(values), "acc,none": mean, "acc_stderr,none": stderr}
        },
        "n-shot": {"mine": 2},
        "versions": {"mine": 1.0},
        "samples": {},
        **more,
    }
    if samples:
        found["samples"]["mine"] = [
            {"doc_id": index, "doc_hash": f"h{index}", "filter": "none", "acc": value}
            for index, value in enumerate(values)
        ]
    return found


FIRST, SECOND = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]


def test_paired_questions_have_the_standard_error_of_their_differences():
    (one,) = differences(results_of(FIRST), results_of(SECOND))
    each = [b - a for a, b in zip(FIRST, SECOND, strict=True)]
    assert one.delta == pytest.approx(1 / 6)
    assert one.stderr == pytest.approx(statistics.stdev(each) / math.sqrt(6))
    assert one.num_pairs == 6


def test_without_samples_standard_errors_add_as_those_of_independent_results():
    (one,) = differences(results_of(FIRST, samples=False), results_of(SECOND))
    assert one.stderr == pytest.approx(
        math.hypot(*(statistics.stdev(v) / math.sqrt(6) for v in (FIRST, SECOND)))
    )
    assert one.num_pairs == 0


def test_other_questions_are_not_paired():
    second = results_of(SECOND)
    second["samples"]["mine"][0]["doc_hash"] = "another"
    (one,) = differences(results_of(FIRST), second)
    assert one.num_pairs == 0


def test_a_metric_that_is_no_mean_of_its_samples_is_not_paired():
    first = results_of(FIRST)
    first["results"]["mine"]["acc,none"] = 17.0
    (one,) = differences(first, results_of(SECOND))
    assert one.num_pairs == 0


def test_a_standard_error_that_lm_eval_does_not_know_is_not_made_up():
    first = results_of(FIRST, samples=False)
    first["results"]["mine"]["acc_stderr,none"] = "N/A"
    (one,) = differences(first, results_of(SECOND))
    assert one.stderr is None


def test_what_is_no_fair_pair_is_said():
    first = results_of(FIRST, task_hashes={"mine": "a"}, chat_template_sha=None)
    second = results_of(FIRST, **{"n-shot": {"mine": 0}}, task_hashes={"mine": "b"}, chat_template_sha="c")
    assert list(cautions(first, second)) == [
        "mine: examples differ: 2 and 0",
        "mine: the questions or prompts differ",
        "the chat templates differ",
    ]
    assert list(cautions(first, first)) == []


def test_no_common_task():
    with pytest.raises(InputError, match=r"no task in common.*'mine'"):
        differences(results_of(FIRST), {"results": {"other": {}}, "samples": {}})


def test_samples_that_lm_eval_wrote_beside_its_results_are_read(tmp_path):
    found = results_of(FIRST)
    samples = found.pop("samples")["mine"]
    (tmp_path / "results_2026-11-23T10-00-00.json").write_text(json.dumps(found))
    (tmp_path / "samples_mine_2026-11-23T10-00-00.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in samples)
    )
    assert read_results(tmp_path / "results_2026-11-23T10-00-00.json")["samples"]["mine"] == samples


@pytest.mark.parametrize("content", ["{", "[1]", '{"loss": 1}'])
def test_a_file_without_results(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InputError, match=r"results.* --out FILE"):
        read_results(tmp_path / "a.json")


def test_samples_that_lm_eval_wrote_may_hold_any_end_of_line(tmp_path):
    results = {**results_of(FIRST), "samples": {}}
    (tmp_path / "results_2026.json").write_text(json.dumps(results))
    sample = {"doc_id": 0, "text": "one\u2028two\x85three"}
    (tmp_path / "samples_mine_2026.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\n")
    assert read_results(tmp_path / "results_2026.json")["samples"] == {"mine": [sample]}


def test_half_a_file_of_samples_is_refused(tmp_path):
    (tmp_path / "results_2026.json").write_text(json.dumps({**results_of(FIRST), "samples": {}}))
    (tmp_path / "samples_mine_2026.jsonl").write_text('{"doc_id": 0}\n{"doc_')
    with pytest.raises(InputError, match=r"samples of .* cannot be read"):
        read_results(tmp_path / "results_2026.json")
