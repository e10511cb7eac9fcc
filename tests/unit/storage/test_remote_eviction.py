"""Which files go first when the cache is full."""

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.storage.cache import IDLE_S, CacheFile, victims

ENTRIES = st.lists(
    st.builds(
        CacheFile,
        path=st.integers(0, 10**6).map(lambda number: Path(f"key/{number:08x}")),
        disk_bytes=st.integers(0, 1000),
        age_s=st.floats(0, 10_000),
        next_use=st.none() | st.floats(0, 10**9) | st.just(math.inf),
    ),
    unique_by=lambda entry: entry.path,
)


def named(name: str, *, age_s: float = 0.0, next_use: float | None = None) -> CacheFile:
    return CacheFile(Path("key") / name, 10, age_s, next_use)


def order(*entries: CacheFile) -> list[str]:
    return [entry.path.name for entry in victims(entries, excess_bytes=10**9)]


def test_what_is_needed_last_goes_first_and_what_is_never_needed_before_it() -> None:
    entries = named("soon", next_use=1.0), named("never", next_use=math.inf), named("later", next_use=99.0)
    assert order(*entries) == ["never", "later", "soon"]


def test_what_no_one_speaks_for_goes_by_age() -> None:
    assert order(named("new", age_s=1.0), named("old", age_s=5.0)) == ["old", "new"]


def test_idle_files_go_before_known_ones_and_lately_used_ones_after() -> None:
    entries = (
        named("known", next_use=math.inf),
        named("idle", age_s=IDLE_S + 1),
        named("fresh", age_s=1.0),
    )
    assert order(*entries) == ["idle", "known", "fresh"]


@given(entries=ENTRIES, excess=st.integers(-10, 20_000))
def test_enough_is_freed_and_no_more_than_one_file_too_much(entries: list[CacheFile], excess: int) -> None:
    doomed = victims(entries, excess_bytes=excess)
    freed = sum(entry.disk_bytes for entry in doomed)
    assert freed >= min(excess, sum(entry.disk_bytes for entry in entries))
    assert not doomed or freed - doomed[-1].disk_bytes < excess
    assert doomed == victims(list(reversed(entries)), excess_bytes=excess)  # the same in every process
