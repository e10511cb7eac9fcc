"""Log-probabilities against torch's own."""

import pytest
import torch

from penstock.engine.sampling.sampler import logprobs_of

LOGITS = torch.randn(3, 30, generator=torch.Generator().manual_seed(0)) * 3


def test_logprobs_are_those_of_the_softmax():
    expected = LOGITS.double().log_softmax(-1)
    for row, found in enumerate(logprobs_of(LOGITS, [4, 5, 6], num_top=5)):
        assert found.token == 4 + row
        assert found.logprob == pytest.approx(expected[row, 4 + row].item(), abs=1e-5)
        best = expected[row].topk(5)
        assert list(found.top) == best.indices.tolist()
        assert list(found.top.values()) == pytest.approx(best.values.tolist(), abs=1e-5)
        assert found.rank == int((expected[row] > expected[row, 4 + row]).sum()) + 1


def test_the_likeliest_has_rank_one_and_no_more_than_the_vocabulary_is_listed():
    (found,) = logprobs_of(torch.tensor([[0.0, 50.0]]), [1], num_top=20)
    assert (found.rank, found.logprob, set(found.top)) == (1, 0.0, {0, 1})


def test_none_beside_the_drawn_one_may_be_asked_for():
    (found,) = logprobs_of(LOGITS[:1], [7], num_top=0)
    assert found.top == {}


def test_logits_of_16_bits_are_computed_in_32():
    low = LOGITS.bfloat16()
    found = logprobs_of(low, [4, 5, 6], num_top=2)
    assert found == logprobs_of(low.float(), [4, 5, 6], num_top=2)
