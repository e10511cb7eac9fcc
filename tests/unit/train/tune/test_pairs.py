"""Sides of pairs in a batch that the loader delivers."""

from itertools import pairwise

import pytest
import torch

from penstock.core.errors import CorpusError
from penstock.data import Loader
from penstock.testing.corpora import write_corpus
from penstock.train.step import micro_batches
from penstock.train.tune.pairs import check_pairs, check_single, split_pairs, turns, whole_sequences

FIELDS = ("input_ids", "labels", "position_ids", "cu_seqlens", "rejected")


def pair(start, *, prompt, chosen, rejected):
    """Return tokens that count up from `start`, which are learned, and which are rejected."""
    tokens = list(range(start, start + 2 * prompt + chosen + rejected))
    learned = [False] * prompt + [True] * chosen + [False] * prompt + [True] * rejected
    return tokens, learned, [index >= prompt + chosen for index in range(len(tokens))]


def loader_of(folder, documents, **options):
    tokens, learned, rejected = zip(*documents, strict=True)
    path = write_corpus(folder, tokens, columns={"learned": learned, "rejected": rejected})
    size = {"sequence_length": 24, "global_batch_size": 2, "packing": "whole", "overlong": "drop"}
    return Loader({"pairs": path}, **{**size, **options}, fields=FIELDS)


@pytest.fixture
def batch(tmp_path):
    """Two rows with two pairs each."""
    sizes = [(2, 3, 1), (3, 2, 4), (1, 1, 2), (2, 2, 2)]
    documents = [
        pair(100 * (i + 1), prompt=prompt, chosen=chosen, rejected=rejected)
        for i, (prompt, chosen, rejected) in enumerate(sizes)
    ]
    return loader_of(tmp_path / "c", documents).batch_at(0)


def test_each_side_is_a_sequence_of_its_own_with_its_own_positions(batch):
    found = split_pairs({name: batch[name] for name in FIELDS})
    ids, positions = found["input_ids"].flatten(), found["position_ids"].flatten()
    spans = list(pairwise(found["cu_seqlens"].tolist()))
    assert sorted(ids[first:past].tolist() for first, past in spans if ids[first]) == [
        [100, 101, 102, 103, 104],
        [105, 106, 107],
        [200, 201, 202, 203, 204],
        [205, 206, 207, 208, 209, 210, 211],
        [300, 301],
        [302, 303, 304],
        [400, 401, 402, 403],
        [404, 405, 406, 407],
    ]
    for first, past in spans:
        assert positions[first:past].tolist() == list(range(past - first))
    assert found["cu_seqlens"].dtype == torch.int32


def test_the_labels_are_the_learned_tokens_within_each_side(batch):
    found = split_pairs({name: batch[name] for name in FIELDS})
    learned = found["labels"][found["labels"] != -100]
    expected = [102, 103, 104, 107, 203, 204, 208, 209, 210, 211, 301, 303, 304, 402, 403, 406, 407]
    assert sorted(learned.tolist()) == expected


def test_the_chosen_sequence_of_each_pair_comes_before_its_rejected_one(batch):
    found = split_pairs({name: batch[name] for name in FIELDS})
    ends, ids = found["cu_seqlens"].tolist(), found["input_ids"].flatten()
    firsts = {(int(ids[ends[s]]), int(ids[ends[s + 1]])) for s in found["chosen"].tolist()}
    assert firsts == {(100, 105), (200, 205), (300, 302), (400, 404)}


@pytest.mark.parametrize("rows", [1, 2])
def test_micro_batches_hold_all_pairs_whatever_their_size(batch, rows):
    how = {"device": torch.device("cpu"), "fields": ("rejected",), "prepare": split_pairs}
    assert sum(len(part["chosen"]) for part in micro_batches(batch, rows=rows, **how)) == 4


def test_single_answers_are_refused_by_a_loss_over_pairs(tmp_path):
    answers = [([1, 2, 3, 4], [False, False, True, True], [bad] * 4) for bad in (False, True)]
    batch = loader_of(tmp_path / "c", answers, global_batch_size=1).batch_at(0)
    assert not len(turns(batch["rejected"], batch["cu_seqlens"]))
    check_single(batch)
    with pytest.raises(CorpusError, match=r"2 conversations without a rejected answer .* 'kto'"):
        check_pairs(batch)


def test_pairs_are_refused_by_kto(batch):
    check_pairs(batch)
    with pytest.raises(CorpusError, match=r"4 pairs .* Set tune.loss to 'dpo'"):
        check_single(batch)


def test_single_answers_are_wanted_unless_they_are_marked(tmp_path):
    answers = [([1, 2, 3, 4], [False, True, True, True], [bad] * 4) for bad in (False, True, False)]
    batch = loader_of(tmp_path / "c", answers, global_batch_size=1).batch_at(0)
    found = whole_sequences({name: batch[name] for name in FIELDS})
    assert len(found["examples"]) == 3
    assert int(found["wanted"][found["examples"]].sum()) == 2
