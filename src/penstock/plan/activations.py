"""Activation memory: bytes that a block keeps from its forward for its backward pass; no torch.

Counted tensor by tensor as autograd keeps them; `tests/unit/plan/test_activations.py` compares this with the
live tensors of a CPU, `make null-gpu` with what a GPU's allocator counts. h: hidden,
q and k: widths of queries and keys, f: feed-forward, c: bytes of a number.

    keep       two norms (input and output; on a CPU input and normalised in float32, and output), q k v
               rotated, the output of attention, gate, up, silu (unless compiled) and product
    operators  the block's input, and the outputs of products and attention
    full       the block's input
"""

import math

from penstock.models.decoder.config import DecoderConfig
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.parallel.activation_checkpointing_plan import Mode
from penstock.parallel.layout import ContextRule

_FLOAT32 = 4


def block_bytes(
    model: DecoderConfig,
    *,
    tokens: int,
    compute_bytes: int,
    tensor: int = 1,
    context: int = 1,
    rule: ContextRule = "all_gather",
    row: int = 0,
    norms_in_float32: bool = True,
    is_compiled: bool = False,
    has_codes: bool = False,
) -> dict[Mode, int]:
    """Return the bytes that one block keeps on one rank for a micro-batch, by activation-checkpointing mode.

    Args:
        tokens: tokens of the micro-batch's rows on this rank.
        compute_bytes: bytes per activation.
        tensor: number of tensor-parallel ranks.
        context: number of context-parallel ranks; the result is for the last one, whose queries see all keys.
        rule: rule of context parallelism.
        row: tokens of a whole row; used if `context` > 1.
        norms_in_float32: norms are computed step by step, in float32; False: by one kernel.
        is_compiled: the gate's activation is computed again in the backward pass.
        has_codes: the feed-forward's input is kept in 8 bits, and the product of its gate is computed again
            (float8 with a scale per tensor, compiled).

    >>> shape = DecoderConfig(vocab_size=9, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
    ...                     num_attention_heads=4, num_key_value_heads=2)
    >>> block_bytes(shape, tokens=1, compute_bytes=4)
    {'keep': 4888, 'operators': 2832, 'full': 256}
    """
    c, h, f = compute_bytes, model.hidden_size, model.intermediate_size
    q, k = widths(model, tensor)
    sums = _FLOAT32 * model.num_attention_heads
    attention = c * (2 * q + 2 * k) + sums
    normed = 2 * _FLOAT32 if norms_in_float32 else c
    norms = len(model.block_norms) * (normed * h + _FLOAT32)
    inputs = 2 * c * h if tensor == 1 else 0  # of products: outputs of norms, or the residual stream
    if model.family.qk_norm:
        heads = model.num_attention_heads + k // model.size_of_head
        norms += normed * (q + k) + _FLOAT32 * (2 * tensor if model.family.qk_norm == "whole" else heads)
    spared = (c - 1) * h + c * f if has_codes else 0
    gathered = 0 if tensor == 1 else 2 * c * h  # inputs of products hold the tokens of the whole group
    spread = 0 if context == 1 else _spread(model, c, context=context, rule=rule)
    mask = c * row if context > 1 and rule == "all_gather" else 0  # as numbers, shared by the heads
    inner = c * (2 if not model.family.has_gate else 3 if is_compiled else 4) * f
    keep = norms + inputs + attention + spread + inner - spared
    operators = c * (3 * h + (2 if model.family.has_gate else 1) * f) + attention
    return {
        "keep": tokens * (keep // tensor + gathered + mask),
        "operators": tokens * operators // tensor,
        "full": tokens * c * h // tensor,
    }


def adapter_bytes(
    model: DecoderConfig,
    adapter: AdapterConfig,
    *,
    compute_bytes: int,
    tensor: int = 1,
    norms_in_float32: bool = True,
) -> float:
    """Return the bytes per token that a block with an adapter keeps beyond one that learns all its weights.

    Negative if fewer: frozen weights need no inputs for gradients of their own.
    """
    c, h, layers = compute_bytes, model.hidden_size, {*adapter.layers}
    found = float(c * adapter.rank * len(layers))
    if adapter.dropout:  # each adapter keeps its own inputs, not those that its group shares
        for group in ({"query", "key", "value"}, {"gate", "up"}):
            found += c * h * max(0, len(layers & group) - 1)
        if "output" in layers:
            found += c * model.linear_shapes["output"][1] / tensor
    if norms_in_float32:
        found -= 2 * _FLOAT32 * h / tensor  # normalised, of two norms
    found -= sum(c * h for group in ({"query", "key", "value"}, {"gate", "up"}) if not layers & group)
    if "down" not in layers:
        found -= c * model.intermediate_size / tensor
    if adapter.has_magnitudes:  # outputs before they are multiplied
        found += c * sum(model.linear_shapes[name][0] for name in layers) / tensor
    return found


def widths(model: DecoderConfig, tensor: int = 1) -> tuple[int, int]:
    """Return the widths of a token's queries and of its keys, summed over tensor-parallel ranks."""
    keys = max(model.key_value_heads, tensor)  # ranks that share a head each have all of it
    return model.num_attention_heads * model.size_of_head, keys * model.size_of_head


def _spread(model: DecoderConfig, c: int, *, context: int, rule: ContextRule) -> int:
    """Return the extra bytes per token under context parallelism: whole or exchanged keys and values."""
    q, k = widths(model)
    if rule == "all_gather":  # keys and values of whole rows, one per query head, instead of its own
        return c * (2 * q * context - 2 * k)
    copies = context // math.gcd(context, model.key_value_heads)
    return c * (q + 2 * k * (copies - 1))


def working_bytes(
    model: DecoderConfig, *, tokens: int, compute_bytes: int, tensor: int = 1, context: int = 1
) -> int:
    """Return the peak bytes that a block's backward allocates beyond the kept activations.

    The peak is in the feed-forward: gradients of product, silu and up, less the product, with those of the
    residual stream and of the whole group's tokens; or, under context parallelism, in attention, after the
    feed-forward's activations are freed.
    """
    c, h, f = compute_bytes, model.hidden_size, model.intermediate_size
    q, _ = widths(model)
    gradients, kept = (2, 4) if model.family.has_gate else (1, 2)
    feed_forward = gradients * c * f // tensor + 2 * c * h // tensor + (0 if tensor == 1 else c * h)
    attention = c * (q + 2 * q * context) // tensor - kept * c * f // tensor
    return tokens * max(feed_forward, attention)
