"""Defaults for foreign corpora: the column of tokens and the split, where the user names none."""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.core.errors import CorpusError, UsageError, nearest
from penstock.core.packages import Package

pa = Package("pyarrow", "Arrow and Parquet files")

COLUMN = {"column": "the column that holds the tokens; not needed where only one can"}
"""Option of the formats that have columns."""

TRAIN = "train"

OF_DATASETS = ("state.json", "dataset_info.json", "dataset_dict.json")
"""Files beside the shards that Hugging Face datasets writes."""

_NUMBERED = re.compile(r"(.*-)(\d+)(-of-)(\d+)(.*)")


def integer_type(kind: Any) -> str | None:  # Any: pyarrow has no types
    """Return the numpy name of an integer type, else None."""
    return str(kind) if pa.types.is_integer(kind) else None


def token_lists(schema: Any) -> dict[str, str]:  # Any: pyarrow has no types
    """Return the columns of a schema that are lists of integers, and the type of their items."""
    lists = {
        field.name: integer_type(field.type.value_type)
        for field in schema
        if pa.types.is_list(field.type)
        or pa.types.is_large_list(field.type)
        or pa.types.is_fixed_size_list(field.type)
    }
    return {name: dtype for name, dtype in lists.items() if dtype}


def text_columns(schema: Any) -> list[str]:  # Any: pyarrow has no types
    """Return the columns of a schema that hold texts.

    >>> text_columns(pa.schema({"id": pa.int64(), "body": pa.string()}))
    ['body']
    """
    kinds = {field.name: field.type for field in schema}
    inner = {name: kind.value_type if pa.types.is_dictionary(kind) else kind for name, kind in kinds.items()}
    is_text = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return [name for name, kind in inner.items() if any(check(kind) for check in is_text)]


def no_tokens(schema: Any, options: Mapping[str, str], *, name: str) -> CorpusError:  # Any: pyarrow
    """Return the error for a file without lists of token ids; it says how text becomes a corpus."""
    texts = text_columns(schema)
    if not texts:
        columns = ", ".join(schema.names[:8]) or "none"
        fix = f"Is it a tokenized corpus? Its columns: {columns}."
        return CorpusError(f"{name} has no column of lists of integers", fix=fix)
    column = next((name for name in (options.get("column"), "text") if name in texts), texts[0])
    steps = ["Copy it to this machine."] if "://" in name else []
    path = name
    if "://" in name:
        path = name.rpartition("/")[2] if name.endswith(".parquet") else "FOLDER"
    elif name.endswith(".arrow"):
        path = name.rpartition("/")[0] or "."  # the folder of the dataset
    words = ["penstock", "data", "prepare", path, "--text-column", column, "--train-tokenizer", "4096"]
    steps.append(f"Make a corpus of it: `{shlex.join([*words, '--out', 'corpus'])}`.")
    return CorpusError(f"{name} holds text ({', '.join(texts[:8])}), not token ids", fix=" ".join(steps))


def column_of(candidates: Iterable[str], options: Mapping[str, str], *, name: str, what: str) -> str:
    """Return the column of tokens: the one that the user names, or the only one that can be it.

    Args:
        candidates: columns that can be it.
        name: the file, for messages.
        what: what such a column holds, for messages ("lists of integers").

    Raises:
        CorpusError: no column can be it.
        UsageError: several can, or the named one cannot.
    """
    known = list(candidates)
    if not known:
        raise CorpusError(f"{name} has no column of {what}", fix="Is it a tokenized corpus?")
    named = options.get("column")
    if named is not None and named not in known:
        raise UsageError(f"{name} has no column of {what} of that name", got=named, fix=nearest(named, known))
    if named is None and len(known) > 1:
        raise UsageError(
            f"{name} has several columns of {what}: {', '.join(known)}",
            fix=f"Say which holds the tokens: ',column={known[0]}'.",
        )
    return named or known[0]


def one_split(splits: Mapping[str, list[str]]) -> list[str]:
    """Return the shards of the split that is meant for training: `train`, or the only one.

    Args:
        splits: split (a folder, or a part of the files' names) -> shards.

    Raises:
        UsageError: there are several, and none is `train`.
    """
    if len(splits) == 1:
        return next(iter(splits.values()))
    training = [split for split in splits if split.rpartition("/")[2] == TRAIN]
    if splits and len(training) != 1:
        raise UsageError(
            f"It has {len(splits)} splits, and which is for training is not known",
            got=sorted(splits)[:8],
            fix="Name the folder of one split.",
        )
    return splits[training[0]] if training else []


def in_order(names: Iterable[str]) -> list[str]:
    """Return file names sorted, numbers in them by their value.

    >>> in_order(["part-10", "part-9"])
    ['part-9', 'part-10']
    """
    return sorted(
        names, key=lambda name: [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]
    )


def by_folder(names: Iterable[str]) -> dict[str, list[str]]:
    """Return file names by the folder they lie in, sorted.

    >>> by_folder(["train/a", "train/b", "c"])
    {'': ['c'], 'train': ['train/a', 'train/b']}
    """
    folders: dict[str, list[str]] = {}
    for name in in_order(names):
        folders.setdefault(name.rpartition("/")[0], []).append(name)
    return folders


def absent_numbers(names: Iterable[str]) -> Iterator[str]:
    """Yield, for files named `...-N-of-M...`, the names of those of the M that are not there.

    >>> list(absent_numbers(["web-00000-of-00003.parquet", "web-00002-of-00003.parquet"]))
    ['web-00001-of-00003.parquet']
    """
    found: dict[tuple[str, str], dict[int, str]] = {}
    for name in names:
        if match := _NUMBERED.fullmatch(name):
            found.setdefault((match[1], match[4]), {})[int(match[2])] = name
    for (before, count), held in found.items():
        example = _NUMBERED.fullmatch(next(iter(held.values())))
        assert example is not None
        for number in sorted(set(range(int(count))) - held.keys()):
            yield f"{before}{number:0{len(example[2])}d}-of-{count}{example[5]}"
