"""Remote checkpoint storage in an object store: parallel uploads, the index last; no torch.

An object appears whole or not at all, so a checkpoint exists from the moment its index does. The client
(obstore) uploads in parts and retries failures. Setting aside renames the index.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.checkpoint.layout import INDEX_FILE, step_of
from penstock.core import env
from penstock.core.errors import CheckpointError, ConfigError
from penstock.storage import address
from penstock.storage.retry import client_errors, failure_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore


T = TypeVar("T")

_ASIDE_FILE = f"{INDEX_FILE}.aside"
_PART_BYTES = 2**24
"""Part size of an upload in bytes. S3 allows 10,000 parts: files of up to 160 GB."""
_READ_BYTES = 2**23
"""Size of one request in bytes; longer reads are several parallel requests."""


class RemotePlace:
    """Objects below one address. Does not survive a fork; nothing is sent before the first call."""

    def __init__(self, location: str) -> None:
        place = address.parse(location)
        if not place.has_listing:
            raise ConfigError(
                "Checkpoints cannot be written to a web server",
                got=location,
                fix="Give a folder, or an address of s3://, gs:// or az://.",
            )
        self._url = place.url
        self._made: ObjectStore | None = None

    def url_of(self, name: str) -> str:
        """Return its address."""
        return f"{self._url}/{name}"

    def names(self) -> list[str]:
        """Return the names of checkpoints with an index, in no order."""
        return [name for name, files in self._listing().items() if INDEX_FILE in files]

    def leftovers(self) -> list[str]:
        """Return the names without an index that were not set aside."""
        ends = {INDEX_FILE, _ASIDE_FILE}
        return [name for name, files in self._listing().items() if not ends & set(files)]

    def write(self, name: str, file: str, parts: Sequence[memoryview]) -> None:
        """Upload one file, in parallel parts."""
        if name in self.names():  # otherwise the old index would vouch for new files
            self._asked(lambda store: store.delete(f"{name}/{INDEX_FILE}"), name)
        self._asked(
            lambda store: store.put(
                f"{name}/{file}", _chunks(parts), use_multipart=True, chunk_size=_PART_BYTES
            ),
            f"{name}/{file}",
        )

    def commit(self, name: str, index: bytes) -> None:
        """Upload the index, which completes the checkpoint."""
        self._asked(lambda store: store.put(f"{name}/{INDEX_FILE}", index), name)
        self._delete(name, but={INDEX_FILE, *_files_of(index)})

    def abandon(self, name: str) -> None:
        """Delete the uploaded files; there is no index."""
        self._delete(name, but={_ASIDE_FILE})

    def remove(self, name: str) -> None:
        """Delete the objects, the index first."""
        self._asked(lambda store: store.delete(f"{name}/{INDEX_FILE}"), name)
        self._delete(name, but=set())

    def set_aside(self, name: str) -> None:
        """Rename the index, so that the checkpoint no longer counts."""
        self._asked(lambda store: store.rename(f"{name}/{INDEX_FILE}", f"{name}/{_ASIDE_FILE}"), name)

    def size(self, name: str, file: str) -> int:
        """Return the size of an object in bytes."""
        size: int = self._asked(lambda store: store.head(f"{name}/{file}")["size"], f"{name}/{file}")
        return size

    def read(self, name: str, file: str, start: int, stop: int) -> memoryview:
        """Return bytes of an object, fetched by several parallel requests."""
        path = f"{name}/{file}"
        stop = min(stop, self.size(name, file))
        starts = list(range(start, stop, _READ_BYTES))
        ends = [min(begin + _READ_BYTES, stop) for begin in starts]
        if not starts:
            return memoryview(bytearray())
        found = self._asked(lambda store: store.get_ranges(path, starts=starts, ends=ends), path)
        return memoryview(bytearray().join(found))

    def _listing(self) -> dict[str, list[str]]:
        """Return the objects of each checkpoint, by its name."""
        found: dict[str, list[str]] = {}
        for batch in self._asked(lambda store: list(store.list()), ""):
            for meta in batch:
                name, _, file = meta["path"].partition("/")
                if step_of(name) is not None:
                    found.setdefault(name, []).append(file)
        return found

    def _delete(self, name: str, *, but: set[str]) -> None:
        doomed = [f"{name}/{file}" for file in self._listing().get(name, []) if file not in but]
        if doomed:
            self._asked(lambda store: store.delete(doomed), name)

    def _asked(self, work: Callable[[Any], T], what: str) -> T:  # Any: ObjectStore has no methods for mypy
        """Call the store; convert its errors to ours."""
        try:
            if self._made is None:
                self._made = _connect(self._url)
            return work(self._made)
        except FileNotFoundError:
            raise FileNotFoundError(2, "No such object", self.url_of(what)) from None
        except CheckpointError:
            raise
        except client_errors() as error:
            failure = failure_of(error)
            raise CheckpointError(
                f"{self.url_of(what).rstrip('/')}: {failure.reason}",
                fix=failure.advice or "Check the network and the store's state.",
            ) from None


def _connect(url: str) -> "ObjectStore":
    try:
        from obstore.store import from_url
    except ImportError:
        raise CheckpointError(
            f"Writing to {url} needs the package obstore", fix="pip install 'penstock[remote]'."
        ) from None
    return from_url(
        url,
        client_options={
            "connect_timeout": timedelta(seconds=10),
            "timeout": timedelta(seconds=300),
            "allow_http": env.allow_plain_http_endpoint(),
        },
        retry_config={"max_retries": 8, "retry_timeout": timedelta(seconds=300)},
    )


def _chunks(parts: Sequence[memoryview]) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _PART_BYTES):
            yield part[start : start + _PART_BYTES]


def _files_of(index: bytes) -> set[str]:
    return set(json.loads(index)["files"])
