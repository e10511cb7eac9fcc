"""Transforms: apply a user's function of (sample, rng keyed by its id) to a batch, and check its results.

A transform sees one row at a time and a generator that depends on the seed of the run and the id of the
sample, never on what ran before: the result is the same on any number of ranks, threads or processes, in any
batch, and when a step is computed again. numpy guarantees the raw stream of a bit generator but may change
the methods of `Generator` (NEP 19), so a run whose transforms use random numbers should keep its numpy
version.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.core.arrays import Int32, Int64
from penstock.core.errors import TransformError
from penstock.core.rng import key_of
from penstock.data.types import IGNORED_LABEL

NEEDED_FIELDS = ("input_ids", "labels", "cu_seqlens")
"""Fields of the batch that `apply` requires, besides `sample_ids`."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Row given to a transform. The arrays are read-only; a transform returns a new Sample."""

    sample_id: int
    """Global sample id."""
    input_ids: Int64
    """[L] tokens."""
    labels: Int64
    """[L] next token of the document; -100 where there is none and on padding."""
    document_ends: Int64
    """[documents] past-the-last position of each document in the row, ascending; the last is L."""

    def documents(self) -> list[slice]:
        """Return the slice of each document in the row."""
        starts = [0, *self.document_ends[:-1].tolist()]
        return [slice(*span) for span in zip(starts, self.document_ends.tolist(), strict=True)]


Transform = Callable[[Sample, np.random.Generator], Sample]
"""Function that returns a sample of the same id and length; for worker processes it must be picklable."""


class Generators:
    """Random generators of samples by id. One generator is reseeded for each, because making one costs 17 us.

    A generator is valid until the next one is requested; not thread-safe.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._fresh: Any = self._bits.state  # Any: numpy's nested dict; a copy

    def of(self, sample_id: int) -> np.random.Generator:
        """Return the generator for the transform of a sample."""
        self._fresh["state"]["key"][0] = key_of(self._seed, "transform", sample_id)
        self._bits.state = self._fresh
        return self._generator


def apply(
    batch: Mapping[str, Int64 | Int32],
    transform: Transform,
    *,
    seed: int,
    fields: Sequence[str],
) -> dict[str, Int64 | Int32]:
    """Return a batch with its rows transformed.

    Args:
        batch: `sample_ids` and NEEDED_FIELDS, shaped as by collate. Its `input_ids` and `labels` are
            overwritten and returned.
        fields: fields to return, besides `sample_ids`: names in collate.FIELDS; document fields are
            recomputed from the transform's result.

    Raises:
        TransformError: the transform failed, or returned no valid sample of that length.
    """
    input_ids, labels = batch["input_ids"], batch["labels"]
    length = input_ids.shape[1]
    row_ends = np.arange(1, len(input_ids) + 1) * length
    all_ends = batch["cu_seqlens"][1:].astype(np.int64)
    by_row = np.split(all_ends, np.searchsorted(all_ends, row_ends[:-1], side="right"))
    ends: list[Int64] = []
    generators = Generators(seed)
    for row, sample_id in enumerate(batch["sample_ids"].tolist()):
        views = (_read_only(input_ids[row]), _read_only(labels[row]), _read_only(by_row[row] - row * length))
        given = Sample(sample_id, *views)
        made = _call(transform, given, generators.of(sample_id))
        if made.input_ids is not given.input_ids:
            input_ids[row] = made.input_ids
        if made.labels is not given.labels:
            labels[row] = made.labels
        ends.append(made.document_ends)
    return {
        "sample_ids": batch["sample_ids"],
        **{name: _field(name, batch, ends, length=length) for name in fields},
    }


def name_of(transform: Transform) -> str:
    """Return a transform's name for messages."""
    return getattr(transform, "__qualname__", type(transform).__qualname__)


def _read_only(array: Int64 | Int32) -> Int64:
    view: Int64 = array.view()  # type: ignore[assignment]  # positions and tokens are int64
    view.flags.writeable = False
    return view


def _call(transform: Transform, given: Sample, rng: np.random.Generator) -> Sample:
    where = f"Transform {name_of(transform)!r} of sample {given.sample_id}"
    try:
        made = transform(given, rng)
    except Exception as error:  # the user's code may raise anything
        raise TransformError(f"{where} failed with {type(error).__name__}: {error}") from error
    if made is not given:
        problem = _problem(made, given)
        if problem:
            raise TransformError(
                f"{where} returned {problem}",
                fix="Return a Sample of the same id and length; set labels to -100 instead of cutting.",
            )
    return made


def _problem(made: Any, given: Sample) -> str | None:  # Any: a user may return anything
    """Return the defect of a returned sample, for the message; None if it is valid."""
    if not isinstance(made, Sample):
        return f"a {type(made).__name__}, not a Sample"
    if made.sample_id != given.sample_id:
        return f"the id {made.sample_id}"
    length = len(given.input_ids)
    for name in ("input_ids", "labels", "document_ends"):
        array = getattr(made, name)
        if array is getattr(given, name):
            continue
        if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"):
            return f"{name} that are not a 1-d array of integers"
        if problem := _ARRAY_PROBLEMS[name](array, length):
            return problem
    return None


def _length_problem(name: str, array: Int64, length: int) -> str | None:
    return f"{len(array)} {name}, the row has {length}" if len(array) != length else None


def _ids_problem(ids: Int64, length: int) -> str | None:
    least = int(ids.min(initial=0))
    return _length_problem("input_ids", ids, length) or (f"the token id {least}" if least < 0 else None)


def _labels_problem(labels: Int64, length: int) -> str | None:
    wrong = labels[(labels < 0) & (labels != IGNORED_LABEL)]
    return _length_problem("labels", labels, length) or (f"the label {wrong[0]}" if len(wrong) else None)


def _ends_problem(ends: Int64, length: int) -> str | None:
    steps = np.diff(ends, prepend=0)
    if len(steps) and steps.min() > 0 and ends[-1] == length:
        return None
    return f"document_ends that do not ascend to {length}: {ends[-4:].tolist()}"


_ARRAY_PROBLEMS = {"input_ids": _ids_problem, "labels": _labels_problem, "document_ends": _ends_problem}


def _field(name: str, batch: Mapping[str, Int64 | Int32], ends: list[Int64], *, length: int) -> Int64 | Int32:
    """Return one field of the transformed batch; `ends` are the document ends of each row."""
    if name in ("input_ids", "labels"):
        return batch[name]
    if name == "cu_seqlens":
        flat = [row_ends + row * length for row, row_ends in enumerate(ends)]
        return np.concatenate((np.zeros(1), *flat)).astype(np.int32)
    out = np.empty((len(ends), length), dtype=np.int64)
    for row, row_ends in enumerate(ends):
        lengths = np.diff(row_ends, prepend=0)
        if name == "document_ids":
            out[row] = np.repeat(np.arange(len(lengths)), lengths)
        else:
            out[row] = np.arange(length) - np.repeat(row_ends - lengths, lengths)
    return out
