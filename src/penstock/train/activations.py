"""Bytes that one block keeps from its forward pass for its backward, by what is recomputed; no torch.

Counted tensor by tensor as autograd keeps them in eager mode on a CPU, which `tests/unit/train/
test_activations.py` holds against the tensors that are alive. Fused norms of GPUs and compiled blocks keep
less. h hidden, q and k widths of queries and keys, f feed-forward, c bytes of a number:

    keep       two norms (input and normalised in float32, output), q k v rotated, what attention returns,
               gate, up, silu and product
    operators  the block's input, and what products and attention return
    full       the block's input
"""

from penstock.models.llama.config import LlamaConfig
from penstock.parallel.recompute_plan import Mode

_FLOAT32 = 4


def block_bytes(model: LlamaConfig, *, tokens: int, compute_bytes: int, tensor: int = 1) -> dict[Mode, int]:
    """Return what one block keeps on one rank for a micro-batch.

    Args:
        tokens: of the micro-batch's rows on this rank.
        compute_bytes: of an activation.
        tensor: ranks that share each matrix, and the tokens between them.

    >>> shape = LlamaConfig(vocab_size=9, hidden_size=64, intermediate_size=160, num_hidden_layers=1,
    ...                     num_attention_heads=4, num_key_value_heads=2)
    >>> block_bytes(shape, tokens=1, compute_bytes=4)
    {'keep': 4888, 'operators': 2832, 'full': 256}
    """
    c, h, f = compute_bytes, model.hidden_size, model.intermediate_size
    q = model.num_attention_heads * model.size_of_head
    key_value_heads = max(model.key_value_heads, tensor)  # ranks that share one each have all of it
    k = key_value_heads * model.size_of_head
    sums = _FLOAT32 * model.num_attention_heads
    attention = c * (2 * q + 2 * k) + sums
    norms = 2 * (2 * _FLOAT32 * h + _FLOAT32 + (c * h if tensor == 1 else 0))
    if model.family.has_query_key_norm:
        norms += 2 * _FLOAT32 * (q + k) + _FLOAT32 * (model.num_attention_heads + key_value_heads)
    gathered = 0 if tensor == 1 else 2 * c * h  # the inputs of products are those of all the group's tokens
    keep = norms + attention + c * 4 * f
    operators = c * (3 * h + 2 * f) + attention
    return {
        "keep": tokens * (keep // tensor + gathered),
        "operators": tokens * operators // tensor,
        "full": tokens * c * h // tensor,
    }
