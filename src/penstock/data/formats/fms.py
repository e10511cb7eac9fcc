"""fms-fsdp's Arrow files: a record batch a document, its tokens a column of integers.

Written and read by IBM's loader (github.com/foundation-model-stack/fms-fsdp,
fms_fsdp/utils/dataset_utils.py, ArrowHandler) in the Arrow file format; streams are read too.
"""

from collections.abc import Mapping

from penstock.data.formats import Options
from penstock.data.formats.choice import in_order
from penstock.data.formats.ipc_tokens import open_batches
from penstock.data.formats.runs import RunShard
from penstock.data.storage import Storage

OPTIONS = {"column": "the column that holds the tokens; 'tokens' if not given"}

_OF_DATASETS = ("state.json", "dataset_info.json")


def open_shard(storage: Storage, name: str, options: Options) -> RunShard:
    """Open one Arrow file; reads the metadata of its batches, none of their tokens.

    Raises:
        CorpusError: it is missing or truncated, or no column holds integers.
        UsageError: which column holds the tokens is not clear.
    """
    return open_batches(storage, name, options)


def find(sizes: Mapping[str, int]) -> list[str]:
    """Return the Arrow files, unless Hugging Face datasets wrote the folder."""
    if any(name.rpartition("/")[2] in _OF_DATASETS for name in sizes):
        return []
    return in_order(name for name in sizes if name.endswith(".arrow"))


def companions(name: str) -> tuple[str, ...]:  # noqa: ARG001 - every format is asked
    """Return nothing: a shard is one file."""
    return ()
