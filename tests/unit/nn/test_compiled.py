"""In the place of a function that the compiler refuses another one runs, which is said once."""

import logging

import torch

from penstock.nn.compiled import fused


def refused(x):
    torch._dynamo.graph_break()  # in one graph only, so it is not compiled
    return x + 2


def plain(x):
    return x + 1


def test_a_function_that_does_not_compile_runs_plain_and_is_named(caplog):
    x = torch.arange(3)
    with caplog.at_level(logging.WARNING):
        assert [fused(refused, plain)(x).tolist() for _ in range(2)] == [[1, 2, 3]] * 2
    (record,) = caplog.records
    assert record.getMessage().startswith("refused does not compile: ")
