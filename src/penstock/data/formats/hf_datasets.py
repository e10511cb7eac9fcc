"""Folders that Hugging Face datasets writes (`save_to_disk`): Arrow streams, one row a document.

The tokens are a column of lists. A folder that holds several splits is read as its `train` split; for
another, name that split's folder. Files are read in place, in the order of their numbers, which is that
of `_data_files` in `state.json` (github.com/huggingface/datasets, arrow_dataset.py).
"""

import re
from collections.abc import Mapping

from penstock.core.errors import CorpusError
from penstock.data.formats import Options
from penstock.data.formats.choice import COLUMN, by_folder, one_split
from penstock.data.formats.ipc_tokens import open_lists
from penstock.data.formats.runs import RunShard
from penstock.data.storage import Storage

OPTIONS = COLUMN

_STATE = "state.json"
_SHARD = re.compile(r"(?:.*/)?(?:data-(?P<index>\d+)-of-(?P<count>\d+)|dataset)\.arrow")


def open_shard(storage: Storage, name: str, options: Options) -> RunShard:
    """Open one Arrow stream; reads where its batches are, not what is in them.

    Raises:
        CorpusError: it is missing or truncated, or no column holds lists of integers.
        UsageError: which column holds the tokens is not clear.
    """
    return open_lists(storage, name, options)


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the Arrow files of the folder's dataset, or of its `train` split.

    Raises:
        CorpusError: a file is missing.
        UsageError: it has several splits, and none is `train`.
    """
    folders = by_folder(name for name in sizes if _SHARD.fullmatch(name) and _described(name) in sizes)
    shards = one_split(folders)
    if shards and (match := _SHARD.fullmatch(shards[-1])) and match["count"]:
        count = int(match["count"])
        if len(shards) != count:
            raise CorpusError(
                f"The dataset that holds {shards[-1]} has {len(shards)} of its {count} files",
                fix="Copy the missing ones, or save the dataset again.",
            )
    return shards


def companions(name: str) -> tuple[str, ...]:  # noqa: ARG001 - every format is asked
    """Return nothing: a shard is one file."""
    return ()


def _described(name: str) -> str:
    return f"{name.rpartition('/')[0]}/{_STATE}".lstrip("/")
