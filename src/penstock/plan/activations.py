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
from penstock.models.decoder.layer_kind import LayerKind
from penstock.nn.linear.adapter_config import AdapterConfig
from penstock.nn.score_chunks import chunk_bytes
from penstock.parallel.activation_checkpointing_plan import Mode
from penstock.parallel.layout import ContextRule

_FLOAT32 = 4


def block_bytes(
    model: DecoderConfig,
    kind: LayerKind,
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
    lacks_log_sums: bool = False,
) -> dict[Mode, int]:
    """Return the bytes that one block keeps on one rank for a micro-batch, by activation-checkpointing mode.

    Args:
        tokens: tokens of the micro-batch's rows on this rank.
        compute_bytes: bytes per activation.
        tensor: number of tensor-parallel ranks.
        context: number of context-parallel ranks; the result is for the last one, whose queries see all keys.
        rule: rule of context parallelism.
        row: tokens of a whole row; used if `context` > 1 or `lacks_log_sums`.
        norms_in_float32: norms are computed step by step, in float32; False: by one kernel.
        is_compiled: the gate's activation is computed again in the backward pass.
        has_codes: the feed-forward's input is kept in 8 bits, and the product of its gate is computed again
            (float8 with a scale per tensor, compiled).
        lacks_log_sums: no kernel of these ranks returns log-sums, so that the formula computes sinks.

    >>> shape = DecoderConfig(vocab_size=9, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
    ...                     num_attention_heads=4, num_key_value_heads=2)
    >>> block_bytes(shape, shape.layers[0], tokens=1, compute_bytes=4)
    {'keep': 4888, 'operators': 2832, 'full': 256}
    """
    c, h, f = compute_bytes, model.hidden_size, model.intermediate_size
    normed = 2 * _FLOAT32 if norms_in_float32 else c
    keep = len(model.block_norms(kind)) * (normed * h + _FLOAT32)
    operators, parts = c * h, len(kind.parts)
    gathered = 0 if tensor == 1 else parts * c * h  # inputs of products hold the tokens of the whole group
    keep += parts * c * h if tensor == 1 else 0  # inputs of products: of norms, or the residual stream
    mask = scores = 0
    if kind.attention is not None:
        q, k = widths(model, tensor)
        sums = _FLOAT32 * model.num_attention_heads
        attention = c * (2 * q + 2 * k) + sums
        keep += attention + (0 if context == 1 else _spread(model, c, context=context, rule=rule))
        operators += c * h + attention
        is_gathered = context > 1 and rule == "all_gather"
        if model.family.has_sinks and (is_gathered or lacks_log_sums):
            keep += _written_out(model, c, context=context, is_gathered=is_gathered) - sums
            operators += (_FLOAT32 - c) * q - sums  # the output before it is rounded, instead of after
            scores = score_bytes(model, row=row, tensor=tensor)
            mask = scores + row  # which keys are hidden
        elif is_gathered and model.attn_logit_softcapping is None:
            mask = c * row  # as numbers, shared by the heads
        if model.family.qk_norm:
            heads = model.num_attention_heads + k // model.size_of_head
            keep += normed * (q + k) + _FLOAT32 * (2 * tensor if model.family.qk_norm == "whole" else heads)
    if kind.feed_forward is not None:
        keep += c * (2 if not model.family.has_gate else 3 if is_compiled else 4) * f
        keep -= (c - 1) * h + c * f if has_codes else 0
        operators += c * (h + (2 if model.family.has_gate else 1) * f)
    return {
        "keep": tokens * (keep // tensor + gathered + mask),
        "operators": tokens * (operators // tensor + scores),  # a product of queries and keys
        "full": tokens * c * h // tensor,
    }


def adapter_bytes(
    model: DecoderConfig,
    kind: LayerKind,
    adapter: AdapterConfig,
    *,
    compute_bytes: int,
    tensor: int = 1,
    norms_in_float32: bool = True,
) -> float:
    """Return the bytes per token that a block with an adapter keeps beyond one that learns all its weights.

    Negative if fewer: frozen weights need no inputs for gradients of their own.
    """
    c, h = compute_bytes, model.hidden_size
    shapes = {path.rpartition(".")[2]: shape for path, shape in model.linear_shapes(kind).items()}
    layers = shapes.keys() & {*adapter.layers}
    groups = {"attention": {"query", "key", "value"}, "mlp": {"gate", "up"}}  # of the same inputs
    found = float(c * adapter.rank * len(layers))
    if adapter.dropout:  # each adapter keeps its own inputs, not those that its group shares
        for part in kind.parts:
            found += c * h * max(0, len(layers & groups[part]) - 1)
        if "output" in layers:
            found += c * shapes["output"][1] / tensor
    if norms_in_float32:
        found -= len(kind.parts) * _FLOAT32 * h / tensor  # normalised, of a norm of each part
    found -= sum(c * h for part in kind.parts if not layers & groups[part])
    if "down" in shapes.keys() - layers:
        found -= c * model.intermediate_size / tensor
    if adapter.has_magnitudes:  # outputs before they are multiplied
        found += c * sum(shapes[name][0] for name in layers) / tensor
    return found


def widths(model: DecoderConfig, tensor: int = 1) -> tuple[int, int]:
    """Return the widths of a token's queries and of its keys, summed over tensor-parallel ranks."""
    keys = max(model.key_value_heads, tensor)  # ranks that share a head each have all of it
    return model.num_attention_heads * model.size_of_head, keys * model.size_of_head


def score_bytes(model: DecoderConfig, *, row: int, tensor: int = 1) -> int:
    """Return the bytes of a token's attention weights where the formula computes sinks."""
    return _FLOAT32 * model.num_attention_heads // tensor * row


def _written_out(model: DecoderConfig, c: int, *, context: int, is_gathered: bool) -> int:
    """Return the extra bytes per token of the formula's operands: queries, and keys and values of each query
    head, in float32."""
    q, k = widths(model)
    repeated = 2 * q * context if is_gathered else 2 * q
    already = repeated if is_gathered else 2 * k
    return _FLOAT32 * (q + repeated) - c * (q + already)


def _spread(model: DecoderConfig, c: int, *, context: int, rule: ContextRule) -> int:
    """Return the extra bytes per token under context parallelism: whole or exchanged keys and values."""
    q, k = widths(model)
    if rule == "all_gather":  # keys and values of whole rows instead of its own; under a mask, per query head
        heads = q if model.attn_logit_softcapping is None else k
        return c * (2 * heads * context - 2 * k)
    copies = context // math.gcd(context, model.key_value_heads)
    return c * (q + 2 * k * (copies - 1))


def working_bytes(
    model: DecoderConfig,
    kind: LayerKind,
    *,
    tokens: int,
    compute_bytes: int,
    tensor: int = 1,
    context: int = 1,
    rule: ContextRule = "all_gather",
    row: int = 0,
    lacks_log_sums: bool = False,
) -> int:
    """Return the peak bytes that a block's backward allocates beyond the kept activations.

    The peak is in the feed-forward: gradients of product, silu and up, less the product, with those of the
    residual stream and of the whole group's tokens; or, under context parallelism, in attention, after the
    feed-forward's activations are freed. Weights that the formula computes have gradients of their size, and
    so have scores. A softcap has scores, keys, values and sums of their gradients in float32 (with `row`).
    """
    c, h, f = compute_bytes, model.hidden_size, model.intermediate_size
    q, k = widths(model)
    gradients, kept = (2, 4) if model.family.has_gate else (1, 2)
    if kind.feed_forward is None:
        gradients, kept = 0, 0
    feed_forward = gradients * c * f // tensor + 2 * c * h // tensor + (0 if tensor == 1 else c * h)
    is_gathered = context > 1 and rule == "all_gather"
    is_written_out = model.family.has_sinks and (is_gathered or lacks_log_sums)
    attention = c * (q + 2 * q * context) // tensor
    if is_written_out:  # gradients of values replace the values
        attention = 2 * score_bytes(model, row=row, tensor=tensor) + 2 * c * h // tensor
    attention -= kept * c * f // tensor
    whole = tokens * (feed_forward if kind.attention is None else max(feed_forward, attention))
    if kind.attention is None or model.attn_logit_softcapping is None:
        return whole
    copies = 2 if c == _FLOAT32 else 5
    heads = model.num_attention_heads // tensor // (1 if is_gathered else context)
    keys = k * context if is_gathered else k
    capped = chunk_bytes(heads=heads, keys=row)
    capped += tokens * (c * (2 * q + 4 * keys) + copies * _FLOAT32 * keys - kept * c * f) // tensor
    return max(tokens * feed_forward, capped)
