"""Runs in folders and object stores: found by the files that a run writes, named, and given opaque ids."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING

from penstock.core import clock
from penstock.core.errors import CorpusError, PenstockError, UsageError
from penstock.core.log import EventLog
from penstock.obs.metric_names import METRICS_FILE, STARTS_FOLDER
from penstock.obs.run_data.run_files import LocalFiles, RunFiles, StoredFiles
from penstock.storage.address import is_remote, parse
from penstock.storage.options import RemoteOptions

if TYPE_CHECKING:
    from penstock.storage.object_store import Store, StoredObject

_DEEPEST = 5
"""Folders between a given one and a run."""
_AGAIN_S = 2.0
"""Seconds after which folders are searched again."""
_STORED_AGAIN_S = 60.0
"""The same for object stores: a search is one request per folder and run."""
_MAX_WAIT_S = 1.0
"""Seconds for which a caller waits for stores that are searched again; then it gets what was found before."""
_REQUESTS_AT_ONCE = 16
_PATIENCE_S = 20.0
"""Seconds for all attempts of one request: a reader waits for it."""

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run's folder."""

    id: str
    """Of its path. A client sends ids only, so it can name no other file."""
    name: str
    """Path below the folder that was searched; with duplicates, the whole path."""
    files: RunFiles

    @property
    def folder(self) -> Path:
        """Its local folder.

        Raises:
            UsageError: the run lies in an object store.
        """
        return self.files.folder


class UnknownRun(PenstockError):
    """No run has this id, or its folder is gone."""


class RunFolders:
    """The runs in some folders and object stores, searched again now and then.

    Args:
        roots: folders of runs, or folders that hold them; addresses of such folders.
    """

    def __init__(self, roots: Sequence[Path | str]) -> None:
        self._roots = [Path(root).resolve() for root in roots if not is_remote(str(root))]
        self._stores = [_StoreSearch(_store(str(root))) for root in roots if is_remote(str(root))]
        self._runs: dict[str, FoundRun] = {}
        self._searched = -_AGAIN_S
        self._lock = Lock()

    def runs(self) -> list[FoundRun]:
        """Return all runs.

        Raises:
            CorpusError: an object store does not answer, and did not before.
        """
        until = clock.monotonic() + _MAX_WAIT_S
        for search in [started for store in self._stores if (started := store.begin()) is not None]:
            search.join(max(0.0, until - clock.monotonic()))
        stored = [named for store in self._stores for named in store.found]
        with self._lock:
            if clock.monotonic() - self._searched >= _AGAIN_S:
                self._runs = {run.id: run for run in _told_apart([*_local_runs(self._roots), *stored])}
                self._searched = clock.monotonic()
            return [*self._runs.values()]

    def run(self, run_id: str) -> FoundRun:
        """Return a run by its id.

        Raises:
            UnknownRun: there is none.
        """
        for run in self.runs():
            if run.id == run_id:
                return run
        raise UnknownRun("There is no such run", got=run_id, fix="It may have been deleted: see the list.")


def files_of(location: str) -> RunFiles:
    """Return the files of the run in a local folder or at an address.

    Raises:
        UsageError: there is no run at the address, or there are several.
        CorpusError: the object store does not answer.
    """
    if not is_remote(location):
        return LocalFiles(Path(location))
    runs = RunFolders([location]).runs()
    if len(runs) != 1:
        raise UsageError(
            "There must be one run at the address", got=f"{len(runs)} at {location}", fix="Give a run's own."
        )
    return runs[0].files


_Named = tuple[str, RunFiles]
"""Name below the folder that was searched, and the run's files."""


class _StoreSearch:
    """Search of one object store for runs, at most one at a time."""

    def __init__(self, store: "Store") -> None:
        self._store = store
        self.found: list[_Named] = []
        """Runs that the last search found that was answered."""
        self._files: dict[str, StoredFiles] = {}
        self._searched = -math.inf
        self._lock = Lock()

    def begin(self) -> Thread | None:
        """Search again, if it is time to; return the thread that does. The first caller of all waits for it.

        Raises:
            CorpusError: the store does not answer, and did not before.
        """
        is_first = self._searched == -math.inf
        if clock.monotonic() - self._searched < _STORED_AGAIN_S or not self._lock.acquire(blocking=is_first):
            return None
        if not is_first:
            thread = Thread(target=self._search_again, name="console-search", daemon=True)
            thread.start()  # which releases the lock
            return thread
        try:
            if self._searched == -math.inf:  # else somebody else was the first
                self._search()
        finally:
            self._searched = clock.monotonic()
            self._lock.release()
        return None

    def _search_again(self) -> None:
        try:
            self._search()
        except CorpusError as error:
            log.warning("store_unread", "The object store cannot be read: {error}", error=error)
        finally:
            self._searched = clock.monotonic()
            self._lock.release()

    def _search(self) -> None:
        found: list[_Named] = []
        for name, prefix, listed in _runs_in_store(self._store):
            files = StoredFiles(self._store, prefix, listed)
            files = self._files.setdefault(files.location, files)
            files.list(listed)
            found.append((name, files))
        self.found = found


def id_of(location: str) -> str:
    """Return the id of a run's path or address."""
    return hashlib.blake2b(os.fsencode(location), digest_size=8).hexdigest()


def shown(path: str) -> str:
    """Return a path as text that can be sent: bytes of its names that are no UTF-8 are escaped.

    >>> shown("runs/caf\\udce9")
    'runs/caf\\\\xe9'
    """
    return os.fsencode(path).decode(errors="backslashreplace")


def _told_apart(runs: Iterable[_Named]) -> list[FoundRun]:
    """Return each run once, by the first name found; those of one name by their whole path."""
    named: dict[str, _Named] = {}
    for name, files in runs:
        named.setdefault(files.location, (shown(name), files))
    count = Counter(name for name, _ in named.values())
    return [
        FoundRun(id_of(location), name if count[name] == 1 else shown(location), files)
        for location, (name, files) in sorted(named.items(), key=lambda item: item[0])
    ]


def _local_runs(roots: Sequence[Path]) -> Iterator[_Named]:
    for root in roots:
        for folder in _runs_below(root):
            name = root.name if folder == root else str(folder.relative_to(root))
            yield name, LocalFiles(folder)


def _runs_below(root: Path) -> Iterator[Path]:
    """Yield the runs at or below a folder; links to folders are not followed, runs not searched."""
    for at, folders, names in os.walk(root):
        folder = Path(at)
        if METRICS_FILE in names or STARTS_FOLDER in folders:
            yield folder
            folders.clear()
        elif len(folder.relative_to(root).parts) >= _DEEPEST:
            folders.clear()
        else:
            folders[:] = sorted(name for name in folders if not name.startswith("."))


def _store(location: str) -> "Store":
    from penstock.storage.object_store import Store

    options = RemoteOptions(deadline_s=_PATIENCE_S, stall_timeout_s=10, request_timeout_s=60, max_delay_s=4)
    return Store(parse(location, allow_plain_http=options.allow_plain_http), options)


def _runs_in_store(store: "Store") -> Iterator[tuple[str, str, dict[str, "StoredObject"]]]:
    """Yield name, folder and objects of the runs at or below an address: a request for each folder.

    A web server has no listing: its address must be that of a run.
    """
    own = (store.address.prefix or store.address.place).rpartition("/")[2]
    if not store.address.has_listing:
        yield own, "", {METRICS_FILE: store.stat(METRICS_FILE)}
        return
    level = [""]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE, thread_name_prefix="console-store") as pool:
        for _ in range(_DEEPEST + 1):
            below = []
            for prefix, (folders, objects) in zip(level, pool.map(store.folder, level), strict=True):
                if METRICS_FILE in objects or STARTS_FOLDER in folders:
                    yield prefix or own, prefix, objects
                else:
                    below += [f"{prefix}/{name}".lstrip("/") for name in folders if name[:1] != "."]
            level = below
