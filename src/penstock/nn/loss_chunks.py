"""Chunk size of the loss, in tokens; no torch, for the memory planner."""

_CPU_BYTES = 32 * 2**20
_CPU_FEWEST = 256
_ACCELERATOR_BYTES = 2**30
_MULTIPLE = 256


def chunk_tokens(vocab_size: int, *, on_cpu: bool = True, is_fused: bool = False) -> int:
    """Return the number of tokens in a chunk of the loss.

    On a CPU 32 MiB of float32 logits, but at least 256 tokens: each chunk passes once through the output
    matrix and its gradient. By hand, on one AVX2 core in float32, against the plain loss: 0.78 to 0.96 of its
    time with chunks of this size. Of 128,256 logits, 256 tokens took 0.93 to 0.96 of it, 130 took 1.02, 65
    took 1.10, and 8 took 2.1.

    On an accelerator 1 GiB of bfloat16 logits, in multiples of 256 tokens: matrix products need thousands of
    rows to reach the device's peak, and each chunk passes through the gradient of the output matrix, 1 GB in
    float32 for 128,256 ids of 2,048 numbers. With 256 tokens a chunk that took 34 of 222 ms a step (H100).

    Args:
        is_fused: the loss holds logits and their gradient only. Others hold float32 copies besides, and get a
            quarter of the tokens.

    >>> chunk_tokens(4_096), chunk_tokens(128_256)
    (2048, 256)
    >>> chunk_tokens(128_256, on_cpu=False, is_fused=True), chunk_tokens(128_256, on_cpu=False)
    (4096, 1024)
    """
    if on_cpu:
        return max(_CPU_FEWEST, _CPU_BYTES // (4 * vocab_size))
    logits_bytes = _ACCELERATOR_BYTES if is_fused else _ACCELERATOR_BYTES // 4
    return max(1, logits_bytes // (2 * vocab_size * _MULTIPLE)) * _MULTIPLE
