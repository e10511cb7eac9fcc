"""Partners of KTO's examples, and their mismatched sequences."""

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from penstock.data.corpus.open import open_corpus
from penstock.testing.corpora import write_corpus
from penstock.train.tune.mismatches import Examples, partners_of


@given(st.lists(st.sampled_from([b"a", b"b", b"c"]), min_size=1, max_size=12))
def test_a_partner_is_the_nearest_document_before_with_another_prompt(prompts):
    n = len(prompts)
    for i, found in enumerate(partners_of(prompts).tolist()):
        others = [(i - step) % n for step in range(1, n) if prompts[(i - step) % n] != prompts[i]]
        assert found == (others[0] if others else (i - 1) % n)


def test_with_prompts_that_all_differ_answers_turn_by_one_as_in_trl():
    assert partners_of([b"a", b"b", b"c"]).tolist() == [2, 0, 1]


def test_a_mismatched_sequence_is_a_prompt_with_the_answer_of_another(tmp_path):
    documents = [[1, 2, 3, 4], [], [5, 6, 7, 8, 9]]
    learned = [[False, False, True, True], [], [False, True, True, False, True]]
    corpus = open_corpus(write_corpus(tmp_path / "c", documents, columns={"learned": learned}))
    examples = Examples(corpus)
    assert len(examples) == 2
    tokens, labels = examples.mismatched(0, 1, length=16)
    assert tokens.tolist() == [1, 2, 6, 7, 8, 9]
    assert labels.tolist() == [-100, 6, 7, -100, 9, -100]
    tokens, labels = examples.mismatched(1, 0, length=2)
    assert tokens.tolist() == [5, 3]
    assert labels.tolist() == [3, -100]
    assert [examples.number_at(corpus.shard_name(0), start) for start in (0, 3, 4, 8)] == [0, 0, 1, 1]
    assert examples.partners().tolist() == [1, 0]


def test_finding_partners_takes_bytes_per_document_not_per_token(tmp_path):
    documents = [[number % 90, *[7] * 3000, 8] for number in range(200)]
    learned = [[False] * 3001 + [True]] * 200
    corpus = open_corpus(write_corpus(tmp_path / "c", documents, vocab_size=90, columns={"learned": learned}))
    examples = Examples(corpus)
    tracemalloc.start()
    try:
        assert examples.partners()[:2].tolist() == [199, 0]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1_000_000  # the prompts have 4.8 MB as int64
