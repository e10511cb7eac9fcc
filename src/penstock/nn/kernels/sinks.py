"""Attention sinks: a learned score per query head that takes part in the softmax and has no value.

A sink is one more key, which every query sees, with the same score for all queries and a value of 0 (OpenAI,
"gpt-oss-120b & gpt-oss-20b Model Card", arXiv:2508.10925; Xiao et al., arXiv:2309.17453).
Where z is the log-sum of the other scores and s the sink,

    out = softmax(scores) values * sigmoid(z - s)

so a kernel that returns z needs no code for sinks. Its backward pass takes the output and the log-sum. Given
the smaller output and the grown log-sum, log(exp(z) + exp(s)), it computes weights and gradients of queries,
keys and values with the sink in the sum: the sink's own term is the product of its weight and a value of 0.

Kernels that return no log-sum do not take sinks (choose.py).
"""

import torch
from jaxtyping import Float
from torch import Tensor


def add_sinks(
    out: Float[Tensor, "... d"], log_sums: Float[Tensor, "..."], sinks: Float[Tensor, "..."]
) -> tuple[Tensor, Tensor]:
    """Return attention with sinks from attention without, and the grown log-sums.

    Args:
        out: output of the softmax without sinks.
        log_sums: logarithm of the sum of the softmax, float32 or float64.
        sinks: of each query head, broadcast to `log_sums`.
    """
    sinks = sinks.to(log_sums.dtype)
    shrunk = out * torch.sigmoid(log_sums - sinks).unsqueeze(-1)
    return shrunk.to(out.dtype), torch.logaddexp(log_sums, sinks)


def sink_gradients(
    upstream: Float[Tensor, "... d"],
    out: Float[Tensor, "... d"],
    log_sums: Float[Tensor, "..."],
    sinks: Float[Tensor, "..."],
) -> Float[Tensor, "..."]:
    """Return the gradient of the sink in each row of the softmax; its sum over queries is that of the head.

    Args:
        upstream: gradient of `out`.
        out: output with sinks.
        log_sums: grown log-sums, as of `add_sinks`.
        sinks: broadcast to `log_sums`.
    """
    weights = (sinks.to(log_sums.dtype) - log_sums).exp()
    return -weights * (upstream.to(log_sums.dtype) * out.to(log_sums.dtype)).sum(-1)
