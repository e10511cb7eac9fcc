"""Cases that share ranks: where one fails, no test of its batch passes, and the error names it."""

import pytest
from tests import rank_batches
from tests.rank_batches import RankBatches


@pytest.fixture
def batches(monkeypatch):
    """Return four cases, three of them of one rank, in this process, and a list of those that fail."""
    monkeypatch.setattr(rank_batches, "on_ranks", lambda work, ranks: [work(None)] * ranks)
    failing = []

    def work(case, _):
        assert case not in failing
        return case.upper()

    return RankBatches({**dict.fromkeys("abc", 1), "d": 2}, work), failing


def test_each_case_has_the_results_of_its_ranks(batches):
    cases, _ = batches
    assert [cases.of(case) for case in "abcd"] == [["A"], ["B"], ["C"], ["D", "D"]]


def test_a_case_that_fails_fails_its_batch_and_is_named(batches):
    cases, failing = batches
    failing += ["b"]
    for case in "abc":
        with pytest.raises(AssertionError, match=r"^Case 'b': "):
            cases.of(case)
    assert cases.of("d") == ["D", "D"]
