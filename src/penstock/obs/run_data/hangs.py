"""Hangs of a run, from the files that its ranks wrote: the watchdog's diagnosis, and where each rank was.

A rank has one file, which the next hang overwrites. So files belong to one hang if they were written within a
minute of one another, as by ranks whose limits ended one after the other. Only the newest hang is diagnosed:
of earlier ones the files of some ranks are gone, which is no sign that those ranks were frozen.
"""

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import Lock

from penstock.core.errors import ConfigError
from penstock.obs.hang_report import LastWords, diagnose, named_ranks, read_words
from penstock.obs.metric_names import HANGS_FOLDER
from penstock.obs.run_data.run_files import FileStamp, RunFiles
from penstock.obs.sinks import Record

MAX_FILE_BYTES = 4 << 20
"""Of one rank's file, which has some tens of kilobytes."""
_MAX_BYTES = 128 << 20
"""Of all files together."""
_MAX_RANKS = 65_536
_MAX_HANGS = 8
_MAX_STACKS = 16
"""Ranks of a hang whose call stacks are kept."""
_MAX_KNOWN = 4
"""Runs whose hangs are kept."""
_APART_S = 60.0
_LATEST = 2.0**33
"""Unix time, in the year 2242."""
_NAME = re.compile(r"rank-(\d{5,6})\.json", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """One hang."""

    at: float
    """Unix time in seconds of its first file."""
    text: str
    """Diagnosis; of an earlier hang, whose files are left."""
    num_ranks: int
    """Ranks that wrote a state."""
    words: tuple[LastWords, ...]
    """States of the ranks to look at first, those with the fewest collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HangReports:
    """Hangs of a run."""

    hangs: tuple[Hang, ...]
    """The newest ones, the last at the end."""
    unread: tuple[str, ...]
    """Names of files that are damaged, too large or of another version."""
    num_beyond: int
    """Older files that are not read, because there are too many."""


class RecentHangs:
    """Hangs of the runs that were asked for last: an open page asks again at each event. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[str, tuple[object, HangReports]] = OrderedDict()

    def read(self, files: RunFiles, starts: Sequence[Record]) -> HangReports:
        """Return the hangs of a run; files are read only if one of them, or the starts, changed.

        Args:
            starts: records of the run's starts, which have its number of ranks.
        """
        stamps = {name: stamp for name, stamp in files.stamps(HANGS_FOLDER).items() if _NAME.fullmatch(name)}
        of = stamps, [*starts]
        with self._lock:
            before, reports = self._known.get(files.location, (None, None))
        if reports is None or before != of:
            reports = _read(files, stamps, starts)
        with self._lock:
            self._known[files.location] = of, reports
            self._known.move_to_end(files.location)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return reports


def _read(files: RunFiles, stamps: Mapping[str, FileStamp], starts: Sequence[Record]) -> HangReports:
    found: list[LastWords] = []
    unread: list[str] = []
    beyond: list[str] = []
    left = _MAX_BYTES
    for name, stamp in sorted(stamps.items(), key=lambda each: -each[1].modified_s):
        if left < stamp.size <= MAX_FILE_BYTES:
            beyond.append(name)
        elif (words := _words(files, name, stamp)) is None:
            unread.append(name)
        else:
            found.append(words)
            left -= stamp.size
    found.sort(key=lambda words: words.at)
    hangs: list[list[LastWords]] = []
    for words in found:
        if hangs and words.at - hangs[-1][-1].at < _APART_S:
            hangs[-1].append(words)
        else:
            hangs.append([words])
    unknown = {_rank_of(name) for name in (*unread, *beyond)}
    texts = [_remains(words) for words in hangs[:-1]]
    texts += [_diagnosis(words, starts, unknown) for words in hangs[-1:]]
    return HangReports(
        hangs=tuple(_hang(*each) for each in zip(hangs, texts, strict=True))[-_MAX_HANGS:],
        unread=tuple(sorted(unread)),
        num_beyond=len(beyond),
    )


def _rank_of(name: str) -> int:
    return int(name.removeprefix("rank-").removesuffix(".json"))


def _words(files: RunFiles, name: str, stamp: FileStamp) -> LastWords | None:
    if stamp.size > MAX_FILE_BYTES:
        return None
    try:
        with files.open(f"{HANGS_FOLDER}/{name}") as file:
            words = read_words(file.read(stamp.size))
    except (OSError, ConfigError):
        return None
    return words if 0 <= words.rank < _MAX_RANKS and 0 <= words.at < _LATEST else None


def _hang(words: Sequence[LastWords], text: str) -> Hang:
    by_place = sorted(words, key=lambda each: (each.num_collectives, each.rank))
    return Hang(at=words[0].at, text=text, num_ranks=len(words), words=tuple(by_place[:_MAX_STACKS]))


def _diagnosis(words: Sequence[LastWords], starts: Sequence[Record], unread: Collection[int]) -> str:
    number = max(_ranks_at(starts, words[0].at), *(each.rank + 1 for each in words))
    return diagnose(words, world_size=number, unread=unread)


def _remains(words: Sequence[LastWords]) -> str:
    ranks = named_ranks(sorted(each.rank for each in words))
    return f"{ranks} wrote in this hang. A later hang overwrote the other files: no diagnosis."


def _ranks_at(starts: Sequence[Record], at: float) -> int:
    """Return the number of ranks of the newest start before a time; 0: unknown."""
    known = 0
    for start in starts:
        try:
            is_before = datetime.fromisoformat(start["time"]).timestamp() <= at
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        ranks = start.get("ranks")
        if is_before and type(ranks) is int and ranks <= _MAX_RANKS:
            known = ranks
    return known
