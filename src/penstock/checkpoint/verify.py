"""Check every byte of a checkpoint against its checksums; no torch."""

from collections.abc import Callable
from math import prod

from penstock.checkpoint.find import Saved
from penstock.checkpoint.read import ShardReader
from penstock.checkpoint.shard_file import BLOCK_BYTES
from penstock.core.errors import CheckpointDamaged

_AT_ONCE = 16 * BLOCK_BYTES


def faults(saved: Saved, *, progress: Callable[[int, int], None] = lambda *_: None) -> list[str]:
    """Return what is wrong with a checkpoint, one line a fault, the first of each file; nothing if sound.

    Args:
        progress: called with bytes read, and bytes in all.

    Raises:
        CheckpointError: it is gone, or another version of Penstock wrote it.
    """
    found, done = [], 0
    try:
        index = saved.index()
    except CheckpointDamaged as error:
        return [str(error)]
    elements: dict[str, int] = dict.fromkeys(index.tensors, 0)
    for file, entry in index.files.items():
        reader = ShardReader(saved, file, entry)
        try:
            for name, parts in reader.header().parts.items():
                elements[name] = elements.get(name, 0) + sum(part.box.num_elements for part in parts)
            for start in range(0, reader.data_bytes, _AT_ONCE):
                stop = min(start + _AT_ONCE, reader.data_bytes)
                done += len(reader.checked(start, stop))
                progress(done, index.num_bytes)
        except CheckpointDamaged as error:
            found.append(str(error))
    if not found:
        found += [
            f"Checkpoint {saved} has {elements[name]:,} of {prod(entry.shape):,} elements of {name}"
            for name, entry in index.tensors.items()
            if elements[name] != prod(entry.shape)
        ]
    return found
