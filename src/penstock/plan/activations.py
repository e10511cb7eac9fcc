"""Bytes that one block keeps from its forward pass for its backward, by what is recomputed; no torch.

Counted tensor by tensor as autograd keeps them in eager mode on a CPU, which `tests/unit/plan/
test_activations.py` holds against the tensors that are alive. Fused norms of GPUs and compiled blocks keep
less. h hidden, q and k widths of queries and keys, f feed-forward, c bytes of a number:

    keep       two norms (input and normalised in float32, output), q k v rotated, what attention returns,
               gate, up, silu and product
    operators  the block's input, and what products and attention return
    full       the block's input
"""

import math

from penstock.models.llama.config import LlamaConfig
from penstock.parallel.layout import ContextRule
from penstock.parallel.recompute_plan import Mode

_FLOAT32 = 4


def block_bytes(
    model: LlamaConfig,
    *,
    tokens: int,
    compute_bytes: int,
    tensor: int = 1,
    context: int = 1,
    rule: ContextRule = "all_gather",
    row: int = 0,
) -> dict[Mode, int]:
    """Return what one block keeps on one rank for a micro-batch.

    Args:
        tokens: of the micro-batch's rows on this rank.
        compute_bytes: of an activation.
        tensor: ranks that share each matrix, and the tokens between them.
        context: ranks that share each row; the last of them, whose queries see all keys, is meant.
        rule: how they share it.
        row: tokens of a whole row; used where `context` is above 1.

    >>> shape = LlamaConfig(vocab_size=9, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
    ...                     num_attention_heads=4, num_key_value_heads=2)
    >>> block_bytes(shape, tokens=1, compute_bytes=4)
    {'keep': 4888, 'operators': 2832, 'full': 256}
    """
    c, h, f = compute_bytes, model.hidden_size, model.intermediate_size
    q, k = widths(model, tensor)
    sums = _FLOAT32 * model.num_attention_heads
    attention = c * (2 * q + 2 * k) + sums
    norms = 2 * (2 * _FLOAT32 * h + _FLOAT32 + (c * h if tensor == 1 else 0))
    if model.family.has_query_key_norm:
        norms += 2 * _FLOAT32 * (q + k) + _FLOAT32 * (model.num_attention_heads + k // model.size_of_head)
    gathered = 0 if tensor == 1 else 2 * c * h  # the inputs of products are those of all the group's tokens
    spread = 0 if context == 1 else _spread(model, c, context=context, rule=rule)
    mask = c * row if context > 1 and rule == "all_gather" else 0  # shared by the heads, as numbers
    keep = norms + attention + spread + c * 4 * f
    operators = c * (3 * h + 2 * f) + attention
    return {
        "keep": tokens * (keep // tensor + gathered + mask),
        "operators": tokens * operators // tensor,
        "full": tokens * c * h // tensor,
    }


def widths(model: LlamaConfig, tensor: int = 1) -> tuple[int, int]:
    """Return the numbers of a token's queries, and of its keys, on all ranks that share them."""
    keys = max(model.key_value_heads, tensor)  # ranks that share a head each have all of it
    return model.num_attention_heads * model.size_of_head, keys * model.size_of_head


def _spread(model: LlamaConfig, c: int, *, context: int, rule: ContextRule) -> int:
    """Return what a token keeps more where rows are shared: whole keys and values, or what is exchanged."""
    q, k = widths(model)
    if rule == "all_gather":  # keys and values of whole rows, one for each query head, in place of its own
        return c * (2 * q * context - 2 * k)
    copies = context // math.gcd(context, model.key_value_heads)
    return c * (q + 2 * k * (copies - 1))


def working_bytes(
    model: LlamaConfig, *, tokens: int, compute_bytes: int, tensor: int = 1, context: int = 1
) -> int:
    """Return what the backward pass of a block makes beyond what the block kept, at its fullest.

    Where the feed-forward's product has been taken apart: the gradients of product, silu and up, less the
    product; with those of the residual stream, and of all the group's tokens. Or, where rows are shared, in
    attention, when what the feed-forward kept is gone.
    """
    c, h, f = compute_bytes, model.hidden_size, model.intermediate_size
    q, _ = widths(model)
    feed_forward = 2 * c * f // tensor + 2 * c * h // tensor + (0 if tensor == 1 else c * h)
    attention = c * (q + 2 * q * context) // tensor - 4 * c * f // tensor
    return tokens * max(feed_forward, attention)
