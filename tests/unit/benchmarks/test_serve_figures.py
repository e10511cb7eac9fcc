"""The figures of the serving benchmark say what they are called, worked out by hand."""

import pytest
from benchmarks.serve_figures import figures, median_of, tables
from benchmarks.serve_load import many, one, request


def reply(stamps, wall_s, cpu_s, tokens=None):
    tokens = [len(times) for times in stamps] if tokens is None else tokens
    return {"stamps": stamps, "tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s}


def test_a_single_stream_counts_from_its_first_token():
    asked = one(8, 5, vocabulary=100, seed=0)
    found = figures("single", asked, reply([[2.0, 2.1, 2.2, 2.3, 2.4]], wall_s=2.4, cpu_s=4.8))
    assert found["ms_per_token"] == pytest.approx(100)
    # CPU time is shared out by wall time: both cores were busy all along
    assert found["cpu_ms_per_token"] == pytest.approx(200)


def test_a_prompt_counts_until_its_first_token():
    asked = one(500, 1, vocabulary=100, seed=0)
    found = figures("prefill", asked, reply([[0.25]], wall_s=0.3, cpu_s=0.5))
    assert found == {"prompt_tokens_per_s": 2000, "prompt_tokens_per_cpu_s": 1000}


def test_many_requests_count_all_tokens_and_wait_from_their_arrival():
    asked = [request(0.0, [3], 2), request(1.0, [4], 3)]
    found = figures("2 at once", asked, reply([[0.5, 0.7], [1.1, 1.3, 1.7]], wall_s=2.0, cpu_s=4.0))
    assert (found["tokens_per_s"], found["tokens_per_cpu_s"]) == (2.5, 1.25)
    assert found["ttft_p50_ms"] == pytest.approx(300)  # between 500 and 100
    assert found["between_p50_ms"] == pytest.approx(200)


def test_an_event_with_several_tokens_is_waited_for_once_and_counts_for_all_of_them():
    asked = [request(0.0, [3], 5)]
    found = figures("1 at once", asked, reply([[0.5, 0.7, 1.1]], wall_s=2.0, cpu_s=4.0, tokens=[5]))
    assert found["tokens_per_s"] == 2.5
    assert found["between_p50_ms"] == pytest.approx(300)
    alone = figures("single", asked, reply([[0.5, 0.7, 1.1]], wall_s=1.1, cpu_s=2.2, tokens=[5]))
    assert alone["ms_per_token"] == pytest.approx(150)


def test_an_engine_that_leaves_tokens_out_is_not_measured():
    with pytest.raises(AssertionError):
        figures("single", one(8, 3, vocabulary=100, seed=0), reply([[1.0, 2.0]], wall_s=2, cpu_s=2))


def test_arrivals_have_the_rate_asked_for_and_all_engines_get_the_same():
    first, again = (many(2000, vocabulary=100, seed=3, per_s=50.0) for _ in range(2))
    assert first == again
    assert 2000 / first[-1]["arrival_s"] == pytest.approx(50, rel=0.1)


def test_tables_have_a_row_an_engine_and_medians_are_over_rounds():
    cases = {
        "single": [
            {"ms_per_token": ms, "cpu_ms_per_token": 2 * ms, "percent_of_roofline": 450 / ms}
            for ms in (9.0, 7.0, 50.0)
        ],
        "prefill": [{"prompt_tokens_per_s": 1.0, "prompt_tokens_per_cpu_s": 1.0, "percent_of_peak": 85.0}],
    }
    results = {"ours": {case: median_of(rounds) for case, rounds in cases.items()}}
    lines = tables(results)
    assert [line.split() for line in lines[:2]] == [
        ["engine", "ms/token", "%", "of", "roofline", "prompt/s", "%", "of", "peak"],
        ["ours", "9.0", "50.0", "1.0", "85.0"],
    ]
