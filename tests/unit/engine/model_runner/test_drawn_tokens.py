"""Tokens that steps leave on the device: the next step looks them up, the host reads them later."""

import numpy as np
import torch

from penstock.engine.model_runner.drawn_tokens import DrawnTokens
from tests.unit.engine.model_runner.test_whole_steps import a_batch


def test_ids_are_those_that_the_last_step_drew_or_those_that_are_known():
    drawn = DrawnTokens(4, torch.device("cpu"))
    drawn.keep(torch.tensor([11, 12, 13]))
    drawn.keep(torch.tensor([21, 22]))
    known, places = drawn.split(np.array([5, ~1, ~0, 7, ~1]))
    ids = drawn.ids(torch.from_numpy(known), torch.from_numpy(places))
    assert ids.tolist() == [5, 22, 21, 7, 22]


def test_a_step_is_read_after_the_next_one_has_drawn():
    drawn = DrawnTokens(2, torch.device("cpu"))
    first = drawn.keep(torch.tensor([3, 4]))
    second = drawn.keep(torch.tensor([5, 6]))
    assert (first(), second()) == ([3, 4], [5, 6])
    halves = [drawn.turn() for _ in range(3)]
    assert halves == [0, 2, 0] or halves == [2, 0, 2]


def test_after_logits_that_were_not_finite_the_id_is_one_that_there_is():
    drawn = DrawnTokens(2, torch.device("cpu"))
    read = drawn.keep(torch.tensor([-1, 9]))
    batch, places = drawn.resolved(a_batch([(3, 4), (5, 6)]))
    assert places is None
    assert (batch.token_ids >= 0).all()
    known, at = drawn.split(np.array([~0, ~1]))
    assert drawn.ids(torch.from_numpy(known), torch.from_numpy(at)).tolist() == [0, 9]
    assert read() == [-1, 9]
