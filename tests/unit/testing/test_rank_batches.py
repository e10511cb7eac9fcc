"""Cases that share ranks: a failure is that of its case, and no second try forgives one."""

import pytest
from tests import rank_batches
from tests.rank_batches import RankBatches


@pytest.fixture
def batches(monkeypatch):
    """Return three cases of one rank, in this process, and the names of those that fail, once for each."""
    monkeypatch.setattr(rank_batches, "on_ranks", lambda work, ranks: [work(None)] * ranks)
    failing = []

    def work(case, _):
        if case in failing:
            failing.remove(case)
            raise AssertionError(case)
        return case.upper()

    return RankBatches(dict.fromkeys("abc", 1), work), failing


def test_a_case_that_fails_leaves_the_others_of_its_batch(batches):
    cases, failing = batches
    failing += ["b", "b"]
    assert (cases.of("a"), cases.of("c")) == (["A"], ["C"])
    for _ in range(2):
        with pytest.raises(AssertionError, match="b"):
            cases.of("b")


def test_a_batch_that_fails_fails_all_its_cases_though_each_passes_alone(batches):
    cases, failing = batches
    failing += ["b"]
    for case in "abc":
        with pytest.raises(AssertionError, match="b"):
            cases.of(case)
