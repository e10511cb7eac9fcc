"""Folders of Arrow files that other tools wrote: Hugging Face datasets and fms-fsdp.

Hugging Face datasets (`save_to_disk`): Arrow streams, one row a document, whose tokens are a column of lists.
A folder that holds several splits is read as its `train` split; for another, name that split's folder. Files
are read in the order of their numbers, which is that of `_data_files` in `state.json`
(github.com/huggingface/datasets, arrow_dataset.py).

fms-fsdp: Arrow files or streams, one record batch a document, whose tokens are a column of integers
(github.com/foundation-model-stack/fms-fsdp, fms_fsdp/utils/dataset_utils.py, ArrowHandler).
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from penstock.data.formats import Format
from penstock.data.formats.choice import COLUMN, OF_DATASETS, absent_numbers, by_folder, in_order, one_split
from penstock.data.formats.dataset_state import INDICES, STATE, data_files, selection_error
from penstock.data.formats.ipc_tokens import open_batches, open_lists
from penstock.storage.base import Storage

_ONLY = "data-00000-of-00001.arrow"  # the file of a dataset in one
_SHARD = re.compile(r"(?:.*/)?(?:data-(?P<index>\d+)-of-(?P<count>\d+)|dataset)\.arrow")


def find_datasets(sizes: Mapping[str, int]) -> list[str]:
    """Return the Arrow files of the folder's dataset, or of its `train` split.

    A split of which only the state is there is a split, and its file is missing.

    Raises:
        UsageError: it has several splits, and none is `train`.
        CorpusError: its rows are a selection of those in its files.
    """
    if not any(name.rpartition("/")[2] in OF_DATASETS for name in sizes):
        return []
    found = [
        name
        for name in sizes
        if (match := _SHARD.fullmatch(name)) and (match["count"] or indices(name)[0] in sizes)
    ]
    held = {name.rpartition("/")[0] for name in found}
    bare = [
        name for name in sizes if name.rpartition("/")[2] == STATE and name.rpartition("/")[0] not in held
    ]
    chosen = one_split(by_folder([*found, *(f"{name.removesuffix(STATE)}{_ONLY}" for name in bare)]))
    for folder in dict.fromkeys(name.rpartition("/")[0] for name in chosen):
        if f"{folder}/{INDICES}".lstrip("/") in sizes:
            raise selection_error(folder or ".")
    return chosen


def indices(name: str) -> tuple[str, ...]:
    """Return the state that lists a file.

    >>> indices("train/data-00000-of-00002.arrow")
    ('train/state.json',)
    """
    return (f"{name.rpartition('/')[0]}/{STATE}".lstrip("/"),)


def missing(storage: Storage, sizes: Mapping[str, int], shards: Sequence[str]) -> Iterator[str]:
    """Yield the files that the state, or the numbers in the files' names, tell of and that are not there."""
    (state,) = indices(shards[0])
    if state not in sizes:
        yield state
        return
    folder, blob = state.removesuffix(STATE), storage.open(state)
    listed = data_files(blob.read(0, blob.size), blob.name)
    yield from (f"{folder}{name}" for name in listed if f"{folder}{name}" not in sizes)
    yield from absent_numbers(shards)


def find_fms(sizes: Mapping[str, int]) -> list[str]:
    """Return the Arrow files, unless Hugging Face datasets wrote the folder."""
    if any(name.rpartition("/")[2] in OF_DATASETS for name in sizes):
        return []
    return in_order(name for name in sizes if name.endswith(".arrow"))


HF = Format(open_shard=open_lists, find=find_datasets, indices=indices, missing=missing, options=COLUMN)
FMS = Format(
    open_shard=open_batches,
    find=find_fms,
    options={"column": "the column that holds the tokens; 'tokens' if not given"},
)
