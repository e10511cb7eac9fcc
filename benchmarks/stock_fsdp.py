"""FSDP2 by its public switches alone, in the place of `[ethernet]`.

    accumulate   gradient accumulation: parameters stay gathered from the first micro-batch to the last, and
                 gradients are reduced after the last; with `reshard_after_forward = false` in the recipe
    prefetch     each block's gather begins `DEPTH` blocks before it (`set_modules_to_*_prefetch`)
    unshard      all gathers of a step begin before its first forward pass (`unshard(async_op=True)`)

On GPUs FSDP2 gathers and reduces in streams of their own, beside compute. On CPUs a prefetched gather is
waited for where it begins, and every reduction blocks; only `unshard` returns at once.
"""

from contextlib import contextmanager

DEPTH = 2


class StockSchedule:
    """Takes the place of `TrainState.ethernet`.

    Args:
        model: sharded by FSDP2; `model.layers` are its units.
        switches: of those above.
    """

    is_breadth_first = False

    def __init__(self, model, switches):
        self._model, self._switches = model, switches
        self._num_micro_batches = self._index = 0
        if "prefetch" in switches:
            blocks = list(model.layers)
            for block, later in zip(blocks, _following(blocks), strict=True):
                block.set_modules_to_forward_prefetch(later)
            for block, later in zip(blocks[::-1], _following(blocks[::-1]), strict=True):
                block.set_modules_to_backward_prefetch(later)

    @contextmanager
    def step(self, num_micro_batches):
        """Run the passes of a step inside."""
        self._num_micro_batches, self._index = num_micro_batches, 0
        yield

    def next_micro_batch(self):
        """Prepare the passes of the next micro-batch."""
        is_first, is_last = self._index == 0, self._index == self._num_micro_batches - 1
        self._index += 1
        if "accumulate" in self._switches:
            self._model.set_requires_gradient_sync(is_last)
            self._model.set_reshard_after_backward(is_last)
        if "unshard" in self._switches and is_first:
            for module in (self._model, *self._model.layers):
                module.unshard(async_op=True)


def _following(blocks):
    return [blocks[i + 1 : i + 1 + DEPTH] for i in range(len(blocks))]
