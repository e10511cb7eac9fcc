"""What a device could do at best: measured in calm, or not believed."""

import multiprocessing
import os

import pytest
import torch

from penstock.obs.peak import Round, is_calm, measure_peak


def rounds(*seconds, threads=2, busy=1.0):
    return [Round(each, each * threads * busy) for each in seconds]


@pytest.mark.parametrize(
    ("measured", "calm"),
    [
        (rounds(1.0, 1.01, 1.04), True),
        (rounds(9.0, 1.0, 5.0, 1.01, 1.04), True),  # a few that were disturbed do no harm
        (rounds(1.0, 1.1, 1.2), False),  # the best is luck
        (rounds(1.0, 1.0), False),  # too few to tell
        (rounds(1.0, 1.0, 1.0, busy=0.6), False),  # a neighbour had the cores: alike, and all too slow
        (rounds(1.0, 1.0, 1.0, busy=0.9), True),
        (rounds(1.0, 1.0, 1.0, threads=1), False),  # one of two threads computed
    ],
)
def test_a_peak_is_believed_where_the_best_rounds_agree_and_the_cores_were_ours(measured, calm):
    assert is_calm(measured, threads=2) is calm


def spin():
    while True:
        pass


def test_a_peak_measured_while_others_have_all_cores_is_not_believed():
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0))
    others = [context.Process(target=spin, daemon=True) for _ in range(4 * cores)]
    threads = torch.get_num_threads()
    for other in others:
        other.start()
    try:
        torch.set_num_threads(cores)
        found = measure_peak(torch.device("cpu"), torch.float32)
    finally:
        torch.set_num_threads(threads)
        for other in others:
            other.kill()
            other.join()
    assert found.flops > 0
    assert not found.is_calm
