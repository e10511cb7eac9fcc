"""A forward pass over every document of a corpus by the model of a run, each rank its share.

The ranks that train also score: sharded, sliced and staged as they are, they make equally many passes, and
the values of a block are added up over all of them, which costs 4 bytes a token and value. So every rank has
every value, and machines need no common folder. One process per machine keeps them (`keeps`), block by block,
so that a pass that is interrupted goes on where it was.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.core import clock, config
from penstock.core.arrays import Table
from penstock.core.errors import PassStopped, UsageError
from penstock.core.files import locked, remove_tree, take_lock, write_json
from penstock.core.log import EventLog
from penstock.data.corpus.columns import ColumnWriter, read_index
from penstock.data.corpus.corpus import Corpus
from penstock.data.corpus.manifest import ColumnEntry
from penstock.data.corpus_rows import CorpusRows
from penstock.data.types import IGNORED_LABEL
from penstock.nn.head import OutputHead
from penstock.parallel.mesh import Mesh, World
from penstock.train.objective import DeviceBatch, Finish
from penstock.train.step import check_vocabulary, loss_sum, micro_batches
from penstock.train.tune.pairs import split_pairs

log = EventLog(__name__)

Values = Sequence[Tensor]
"""Values of some tokens, one tensor per column: [tokens] or [tokens, width]."""
Score = Callable[[Tensor, OutputHead, Tensor], Values]
"""Function (hidden [tokens, hidden], head, labels [tokens]) -> values of the labels, 0 if there is none."""
BLOCK_TOKENS = 2**18
"""Tokens after which values are kept; fixed, so that other ranks can go on."""
_SAID_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A model and the ranks that it runs on."""

    model: torch.nn.Module
    world: World
    mesh: Mesh | None
    """None: one process, with the whole model."""
    rows: int
    """Rows per forward pass of a rank."""
    stop_requested: Callable[[], bool] = lambda: False
    """True once this rank was asked to stop."""

    def check_stop(self) -> None:
        """End the pass if any rank was asked to stop; every rank calls it.

        Raises:
            PassStopped: one was.
        """
        if self.world.most(self.stop_requested()):
            raise PassStopped("The pass was stopped on request", fix="Run the same command to continue.")

    @property
    def parts(self) -> int:
        """Number of shares of the rows."""
        return 1 if self.mesh is None else self.mesh.layout.num_data

    @property
    def part(self) -> int:
        """Share of this rank."""
        return 0 if self.mesh is None else self.mesh.data_rank

    @property
    def gives(self) -> bool:
        """True if this rank's values count: it computes the loss, as the first of those with equal ones."""
        mesh = self.mesh
        return mesh is None or (mesh.has_loss and mesh.layout.place(mesh.rank)["tensor"] == 0)

    def slice_of(self, length: int) -> slice:
        """Return this rank's slice of a row."""
        return slice(0, length) if self.mesh is None else self.mesh.sequence_slice(length)


@torch.no_grad()
def score_block(
    of: Pass, rows: CorpusRows, tables: Sequence[Table], score: Score, entries: Sequence[ColumnEntry]
) -> list[Tensor]:
    """Return the values of every token of a block's rows, on every rank: [rows, length], or [..., width]."""
    length = int(np.sum(tables[0][:, 2] - tables[0][:, 1]))
    found = [_zeros(entry, len(tables), length, of.world.device) for entry in entries]
    for first in range(0, len(tables), of.rows * of.parts):
        mine = range(first + of.part * of.rows, first + (of.part + 1) * of.rows)
        chosen = [min(index, len(tables) - 1) for index in mine]
        batch: DeviceBatch = {
            name: torch.from_numpy(values) for name, values in rows.batch([tables[i] for i in chosen]).items()
        }
        excess = torch.tensor([index >= len(tables) for index in mine])
        batch["labels"][excess] = IGNORED_LABEL
        check_vocabulary(batch, of.model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        columns = of.slice_of(length)
        fields = ("rejected",) if "rejected" in batch else ()
        (part,) = micro_batches(
            batch,
            rows=of.rows,
            device=of.world.device,
            sequence_slice=columns,
            fields=fields,
            prepare=split_pairs if fields else lambda part: part,
        )
        values: list[Tensor] = []

        loss_sum(of.model, part, _keeping(values, score, part["labels"].flatten()))
        if of.gives:
            kept = [row for row, index in enumerate(mine) if index < len(tables)]
            for into, each in zip(found, values, strict=True):
                by_row = each.view(of.rows, -1, *into.shape[2:])
                into[[mine[row] for row in kept], columns] = by_row[kept].to(into.dtype)
    if of.world.ranks.world_size > 1:
        for values_of_all in found:
            dist.all_reduce(values_of_all)
    return found


def _keeping(values: list[Tensor], score: Score, labels: Tensor) -> Finish:
    """Return a function that adds the values of labels to a list; its own result means nothing."""

    def finish(hidden: Tensor, head: OutputHead) -> Tensor:
        values.extend(score(hidden.flatten(0, 1), head, labels))
        return hidden.new_zeros((), dtype=torch.float32)

    return finish


def _zeros(entry: ColumnEntry, rows: int, length: int, device: torch.device) -> Tensor:
    shape = (rows, length) if entry.width == 1 else (rows, length, entry.width)
    return torch.zeros(shape, dtype=getattr(torch, entry.dtype), device=device)


class Partial:
    """Values computed so far, kept in a folder beside the final one.

    One process at a time writes that folder, the one that holds its lock. Another that makes the same columns
    meanwhile (a second job, or the first rank of a second machine that shares the folder) begins with what is
    there, and keeps its values in files without names, which are gone if it is killed.

    Args:
        folder: folder of the finished columns, which does not exist yet.
        made_with: what the values depend on, as JSON values: values made with something else are dropped.
        keeps: True if this process writes; the others do nothing.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        entries: Sequence[ColumnEntry],
        made_with: Mapping[str, Any],  # Any: JSON values
        *,
        keeps: bool,
    ) -> None:
        self._folder, self._corpus, self._entries, self._keeps = folder, corpus, entries, keeps
        self._made_with = {"corpus": corpus.manifest.fingerprint, **made_with}
        self._work = folder.with_name(f"{folder.name}.partial")
        self._maps: list[Any] = []  # Any: memory maps of the columns' types
        self.blocks = 0
        """Number of blocks done."""
        self._lock: BinaryIO | None = None
        if keeps:
            folder.parent.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self._lock_file, waits=False)
            if self._lock is None:
                self._copy()
                return
            progress = self._progress()
            if progress.get("made_with") == self._made_with:
                self.blocks = int(progress["blocks"])
            else:
                remove_tree(self._work)
            self._work.mkdir(exist_ok=True)
            self._maps = [self._open(entry) for entry in entries]

    @property
    def _lock_file(self) -> Path:
        return self._work.with_name(f"{self._work.name}.lock")

    def _progress(self) -> dict[str, Any]:  # Any: JSON values
        path = self._work / "progress.json"
        return config.load_json(path) if path.is_file() else {}

    def put(
        self, rows: CorpusRows, tables: Sequence[Table], values: Sequence[Tensor], *, blocks: int
    ) -> None:
        """Keep the values of a block durably; `blocks` are then done."""
        if not self._keeps:
            return
        for stored, tensor in zip(self._maps, values, strict=True):
            flat = tensor.cpu().flatten(0, 1).numpy()
            for at, position, count in rows.labelled(tables):
                stored[position : position + count] = flat[at : at + count]
            stored.flush()
        self.blocks = blocks
        if self._lock is not None:
            write_json(self._work / "progress.json", {"blocks": blocks, "made_with": self._made_with})

    def publish(self) -> None:
        """Make the columns from the values, unless another process did, and remove these.

        Raises:
            UsageError: the folder exists, with values made with something else.
        """
        with locked(self._folder.with_name(f"{self._folder.name}.publish.lock")):
            if not self._folder.exists():
                self._write()
            elif read_index(self._folder).made_with != self._made_with:
                raise UsageError(f"{self._folder} exists", fix="Name a folder that does not.")
        self.remove()

    def _write(self) -> None:
        writer = ColumnWriter(self._folder, self._corpus.manifest, self._entries, made_with=self._made_with)
        with writer:
            for entry, stored in zip(self._entries, self._maps, strict=True):
                for first in range(0, len(stored), 2**20):
                    writer.put(entry.name, first, stored[first : first + 2**20])

    def remove(self) -> None:
        """Remove the partial values, or those of a killed process; not those that another is writing."""
        self._maps.clear()
        lock, self._lock = self._lock or take_lock(self._lock_file, waits=False), None
        if lock is not None:
            remove_tree(self._work)
            self._lock_file.unlink()
            lock.close()

    def _copy(self) -> None:
        """Begin with the values that another process has kept so far, if they are of the same kind."""
        for entry in self._entries:
            with tempfile.TemporaryFile(dir=self._folder.parent) as file:
                file.truncate(entry.bytes_of(self._corpus.num_tokens))
                self._maps.append(np.memmap(file, np.dtype(entry.dtype), "r+", shape=self._shape(entry)))
        try:
            progress = self._progress()
            if progress.get("made_with") != self._made_with:
                return
            for entry, into in zip(self._entries, self._maps, strict=True):
                kept = np.memmap(
                    self._work / entry.name, np.dtype(entry.dtype), "r", shape=self._shape(entry)
                )
                into[:] = kept
        except (OSError, ValueError):  # the other process has finished, and removed them
            return
        self.blocks = int(progress["blocks"])

    def _shape(self, entry: ColumnEntry) -> tuple[int, ...]:
        tokens = self._corpus.num_tokens
        return (tokens,) if entry.width == 1 else (tokens, entry.width)

    def _open(self, entry: ColumnEntry) -> Any:  # Any: as above
        path, tokens = self._work / entry.name, self._corpus.num_tokens
        dtype = np.dtype(entry.dtype)
        with path.open("ab") as file:  # zeros take no space until they are written
            file.truncate(entry.bytes_of(tokens))
        return np.memmap(path, dtype, "r+", shape=self._shape(entry))


def progress_said(what: str, blocks: int, *, says: bool) -> Callable[[int], None]:
    """Return a function that logs the number of blocks done, now and then."""
    began, said = clock.monotonic(), clock.monotonic()

    def on_block(done: int) -> None:
        nonlocal said
        now = clock.monotonic()
        if says and (now - said >= _SAID_EVERY_S or done == blocks):
            said = now
            left = (now - began) / done * (blocks - done)
            log.info(
                "pass",
                "{what:sentence}: {done:,} of {blocks:,} blocks, {left_s:duration} left",
                what=what,
                done=done,
                blocks=blocks,
                left_s=left,
            )

    return on_block


def blocks_from(rows: CorpusRows, first: int) -> Iterator[tuple[int, list[Table]]]:
    """Yield the number and the tables of each block from the first on."""
    for block in range(first, rows.num_blocks):
        yield block, rows.tables(block)
