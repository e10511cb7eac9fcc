"""Page fetcher: bring pages of one object to disk, each once per machine, neighbours in one request.

Within a process one thread at a time fetches a page and the others wait for it. Between processes a claim in
the region's table serves as a hint: a claim of a dead process, or one that lasts too long, is ignored. At
worst, a page is fetched twice.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Protocol

from penstock.core import clock
from penstock.storage.cache import BlockCache, writing_to
from penstock.storage.cache_region import PAGE_BYTES, REGION_BYTES, REGION_PAGES, Region

_POLL_S = 0.01


class Get(Protocol):
    """Function that returns bytes [start, stop) of an object after all possible checks; blocks."""

    def __call__(self, start: int, stop: int, *, hint: bool = False) -> memoryview:
        """Fetch bytes; with `hint` give up at the first failure."""


class Fetcher:
    """Pages of one version of an object.

    Args:
        key: name of the version in the cache.
        size: bytes of the object.
        get: fetches bytes from the store.
        unit_pages: requests start and end at multiples of this number, because `get` checks such units.
        max_request_bytes: limit of one request.
        patience_s: seconds to wait for another process's claim.
    """

    def __init__(
        self,
        cache: BlockCache,
        *,
        key: str,
        size: int,
        get: Get,
        unit_pages: int,
        max_request_bytes: int,
        patience_s: float,
    ) -> None:
        self._cache, self._key, self._size, self.get = cache, key, size, get
        self._unit = unit_pages
        self._num_pages = -(-size // PAGE_BYTES)
        self._max_pages = max(unit_pages, max_request_bytes // PAGE_BYTES // unit_pages * unit_pages)
        self._patience_s = patience_s
        self._in_hand: set[int] = set()
        self._changed = threading.Condition()

    def regions(
        self, start: int, stop: int, *, window: tuple[int, int] | None = None, hint: bool = False
    ) -> list[Region]:
        """Return the regions of bytes [start, stop) after making these bytes present and verified.

        Args:
            window: bytes around them; missing pages in it are fetched along if adjacent to missing bytes.
            hint: True to give up at the first failure, if a later reader will request the bytes again.
        """
        wanted = range(start // PAGE_BYTES, -(-stop // PAGE_BYTES))
        around = wanted
        if window:
            low, high = min(start, window[0]), min(self._size, max(stop, window[1]))
            around = range(low // PAGE_BYTES, -(-high // PAGE_BYTES))
        deadline_s = clock.monotonic() + self._patience_s
        held: dict[int, Region] = {}
        while True:
            self._hold(held, around)
            lacking = set(_missing(held, wanted))
            if not lacking:
                return [held[index] for index in _region_range(wanted)]
            # Includes pages that another process fetched since the first check; these are then found present.
            missing = lacking if around is wanted else lacking.union(_missing(held, around))
            pages = [page for run in _runs(sorted(missing)) if not lacking.isdisjoint(run) for page in run]
            self._bring(held, pages, hint=hint, ignore_claims=clock.monotonic() > deadline_s)

    def _hold(self, held: dict[int, Region], pages: range) -> None:
        """Open the regions of pages; a region already held stays open even if its file is evicted."""
        for index in _region_range(pages):
            if index not in held:
                size = min(REGION_BYTES, self._size - index * REGION_BYTES)
                held[index] = self._cache.region(self._key, index, size)

    def _bring(
        self, held: dict[int, Region], pages: Sequence[int], *, hint: bool, ignore_claims: bool
    ) -> None:
        """Fetch the pages that no other process is fetching; if there are none, wait for the others."""
        claimed = set() if ignore_claims else {page for page in pages if _is_claimed(held, page)}
        with self._changed:
            mine = [page for page in pages if page not in self._in_hand and page not in claimed]
            if not mine:
                self._changed.wait(_POLL_S if claimed else None)
                return
            self._in_hand.update(mine)
        taken = mine
        try:
            # Another thread may have finished between the check and the lock.
            mine = [page for page in mine if held[page // REGION_PAGES].verify(_one(page))]
            for run in self._requests(mine):
                self._fetch(held, run, hint=hint)
        finally:
            with self._changed:
                self._in_hand.difference_update(taken)
                self._changed.notify_all()

    def _requests(self, pages: Sequence[int]) -> Iterator[range]:
        """Split sorted pages into requests, rounded to units."""
        unit = self._unit
        rounded = sorted({page // unit for page in pages})
        for run in _runs(rounded):
            first, past = run.start * unit, min(run.stop * unit, self._num_pages)
            for at in range(first, past, self._max_pages):
                yield range(at, min(at + self._max_pages, past))

    def _fetch(self, held: dict[int, Region], pages: range, *, hint: bool) -> None:
        self._hold(held, pages)
        start = pages.start * PAGE_BYTES
        with writing_to(self._cache.folder_of(self._key)), ExitStack() as opened:
            writers = []
            for index in _region_range(pages):
                local = _inside(index, pages)
                try:
                    writers.append(opened.enter_context(held[index].writing(local.start, local.stop)))
                except FileNotFoundError:  # evicted: the caller's loop starts again with a new file
                    self._cache.forget(self._key, index, held.pop(index))
                    return
            content = self.get(start, min(pages.stop * PAGE_BYTES, self._size), hint=hint)
            rest = content
            for index, write in zip(_region_range(pages), writers, strict=True):
                num_bytes = len(_inside(index, pages)) * PAGE_BYTES
                write(rest[:num_bytes])
                rest = rest[num_bytes:]
        self._cache.wrote(len(content))


def _region_range(pages: range) -> range:
    return range(pages.start // REGION_PAGES, (pages.stop - 1) // REGION_PAGES + 1) if pages else range(0)


def _inside(index: int, pages: range) -> range:
    """Return the pages of a range that are in a region, counted from its start."""
    base = index * REGION_PAGES
    return range(max(pages.start - base, 0), min(pages.stop - base, REGION_PAGES))


def _missing(held: dict[int, Region], pages: range) -> list[int]:
    return [
        index * REGION_PAGES + page
        for index in _region_range(pages)
        for page in held[index].verify(_inside(index, pages))
    ]


def _one(page: int) -> range:
    return range(page % REGION_PAGES, page % REGION_PAGES + 1)


def _is_claimed(held: dict[int, Region], page: int) -> bool:
    return held[page // REGION_PAGES].claimed_by_another(page % REGION_PAGES)


def _runs(numbers: Sequence[int]) -> list[range]:
    """Return sorted numbers as contiguous ranges.

    >>> _runs([1, 2, 3, 7, 8])
    [range(1, 4), range(7, 9)]
    """
    if not numbers:
        return []
    breaks = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    cuts = [0, *breaks, len(numbers)]
    return [range(numbers[low], numbers[high - 1] + 1) for low, high in pairwise(cuts)]
