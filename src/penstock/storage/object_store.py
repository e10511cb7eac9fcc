"""Object store client: byte ranges with retries and identity checks.

Every answer is compared with the request: range, length, and the identity of the object. The client library
(obstore, which wraps the Rust crate object_store) makes one attempt at a time and keeps the connections;
retries are made here, where an error can name the object and the remedy.
"""

import os
from collections.abc import Callable
from concurrent.futures import thread
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core import clock, env
from penstock.core.errors import CorpusChanged, CorpusError
from penstock.core.log import EventLog
from penstock.storage.address import Address, check_name
from penstock.storage.base import Absent
from penstock.storage.block_checksums import Check
from penstock.storage.options import RemoteOptions
from penstock.storage.retry import Failure, client_errors, delay_s, failure_of, retry_after_s

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig


log = EventLog(__name__)

_MAX_OBJECTS = 2_000_000  # in one corpus; stops the listing of a wrong prefix before memory is full
_MAX_WRONG = 4  # wrong checksums of one range before the object counts as damaged
_LOOK_S = 0.2  # between two checks whether the program is ending
_client_pid: int | None = None  # process whose threads serve the client; they do not survive a fork

T = TypeVar("T")


class WrongBytesError(OSError):
    """The bytes received differ from those uploaded."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Version of an object; reads with the same identity see the same bytes."""

    size: int
    """Size in bytes."""
    tag: str
    """The store's ETag, or the modification time; empty if the store gives neither."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as a listing or a look at it shows it."""

    identity: Identity
    modified_s: float
    """Unix time of its last upload; 0 if the store does not tell."""


class Store:
    """Objects below one address. Thread-safe; nothing is sent before the first call."""

    def __init__(self, address: Address, options: RemoteOptions) -> None:
        self.address = address
        self._options = options
        self._made: ObjectStore | None = None
        self.fetched_bytes = 0

    def head(self, name: str) -> Identity:
        """Return an object's identity.

        Raises:
            CorpusError: it is missing, forbidden, or the store does not answer before the deadline.
        """
        return self.stat(name).identity

    def stat(self, name: str) -> StoredObject:
        """Return an object's identity and the time of its upload.

        Raises:
            CorpusError: as for `head`.
        """
        return self._repeat(name, lambda: _stored(self._client().head(check_name(name))))

    def folder(self, name: str = "") -> tuple[list[str], dict[str, StoredObject]]:
        """Return the folders and the objects directly in a folder, by name; both empty if there is none.

        Args:
            name: relative to the address; empty: the address itself.

        Raises:
            CorpusError: as for `head`.
        """
        if name:
            check_name(name)

        def attempt() -> tuple[list[str], dict[str, StoredObject]]:
            found = self._client().list_with_delimiter(name or None)
            folders = [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]
            return folders, {meta["path"].rpartition("/")[2]: _stored(meta) for meta in found["objects"]}

        return self._repeat(name, attempt)

    def find(self, name: str) -> Identity | None:
        """Return an object's identity; None if it is missing or hidden (S3 does not distinguish)."""
        try:
            return self.head(name)
        except Absent:
            return None

    def get(
        self,
        name: str,
        start: int,
        stop: int,
        *,
        identity: Identity,
        check: Check | None = None,
        hint: bool = False,
    ) -> memoryview:
        """Return bytes [start, stop) of an object if it still has the given identity.

        Args:
            check: verifies the bytes against known checksums; wrong bytes are fetched again.
            hint: True to give up at the first failure.

        Raises:
            CorpusChanged: the object was replaced.
            CorpusError: as for `head`.
        """
        strong = identity.tag.startswith('"')  # a weak ETag matches nothing in a condition

        def attempt() -> memoryview:
            options: dict[str, Any] = {"range": (start, stop)}  # Any: obstore's typed dict is import-only
            if strong:
                options["if_match"] = identity.tag
            answer = self._client().get(check_name(name), options=options)
            if (now := _identity(answer.meta)) != identity:
                raise _changed(self.address, name, f"{identity} became {now}")
            content = memoryview(answer.bytes())
            if len(content) != stop - start:
                raise OSError(f"{len(content)} bytes were received, {stop - start} were requested")
            if check and not check(start, content):
                raise WrongBytesError(f"bytes {start} to {stop} have wrong checksums")
            self.fetched_bytes += len(content)
            return content

        return self._repeat(name, attempt, start=start, once=hint)

    def sizes(self) -> dict[str, int]:
        """Return the size of every object below the address, by relative name, in byte order.

        Raises:
            CorpusError: as for `head`, or there are too many.
        """

        def attempt() -> dict[str, int]:
            found: dict[str, int] = {}
            for batch in self._client().list():
                found |= {meta["path"]: meta["size"] for meta in batch}
                if len(found) > _MAX_OBJECTS:
                    raise CorpusError(
                        f"{self.address.url} contains more than {_MAX_OBJECTS:,} objects",
                        fix="Give the address of one corpus.",
                    )
            return dict(sorted(found.items(), key=lambda item: item[0].encode()))

        return self._repeat("", attempt)

    def _client(self) -> Any:  # Any: ObjectStore has no methods for mypy
        global _client_pid
        if _client_pid not in (None, os.getpid()):
            raise CorpusError(
                f"{self.address.url} was opened before this process was forked; connections cannot be",
                fix="Start workers by spawn or forkserver (multiprocessing_context='forkserver').",
            )
        _client_pid = os.getpid()
        if self._made is None:
            self._made = _connect(self.address, self._options)
        return self._made

    def _repeat(self, name: str, attempt: Callable[[], T], *, start: int = 0, once: bool = False) -> T:
        options, began, attempts, wrong = self._options, clock.monotonic(), 0, 0
        while True:
            attempts += 1
            try:
                return attempt()
            except CorpusError:
                raise
            except client_errors() as error:
                if type(error).__name__ == "PreconditionError":
                    raise _changed(self.address, name, "the store holds another version") from None
                failure = failure_of(error)
                wrong += isinstance(error, WrongBytesError)
            if wrong >= _MAX_WRONG:
                advice = "The object or its list of checksums is damaged or outdated: upload both."
                failure = Failure(failure.reason, permanent=True, advice=advice)
            if once:
                raise _given_up(self.address, name, failure, attempts=1, passed_s=0.0)
            asked_s = self._asked_wait(name, failure)
            wait_s = delay_s(
                attempts,
                key=(self.address.url, name, start, os.getpid()),
                first_s=options.first_delay_s,
                most_s=options.max_delay_s,
                overloaded=failure.overloaded,
                retry_after_s=asked_s,
            )
            passed_s = clock.monotonic() - began
            if failure.permanent or passed_s + wait_s > options.deadline_s:
                raise _given_up(self.address, name, failure, attempts=attempts, passed_s=passed_s)
            log.warning(
                "store_unanswered",
                "{place} did not answer attempt {attempt} for {object!r} ({reason}). The next one "
                "follows in {wait_s:.1f} s, the last one {deadline_s:.0f} s after the first",
                place=self.address.place,
                attempt=attempts,
                object=name,
                reason=failure.reason,
                wait_s=wait_s,
                deadline_s=options.deadline_s,
            )
            if not _waited(wait_s):
                raise _given_up(self.address, name, failure, attempts=attempts, passed_s=passed_s)

    def _asked_wait(self, name: str, failure: Failure) -> float | None:
        if not failure.overloaded or self.address.has_listing:
            return None
        return retry_after_s(self.address.url_of(name), timeout_s=self._options.connect_timeout_s)


def _waited(seconds: float) -> bool:
    """Wait; return False as soon as the program ends, because it waits for its pools' threads."""
    end = clock.monotonic() + seconds
    while (left := end - clock.monotonic()) > 0 and not thread._shutdown:  # there is no public name
        clock.sleep(min(left, _LOOK_S))
    return not thread._shutdown


def _connect(address: Address, options: RemoteOptions) -> "ObjectStore":
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError:
        raise CorpusError(
            f"Reading {address.url} needs the package obstore", fix="pip install 'penstock[remote]'."
        ) from None
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        "read_timeout": timedelta(seconds=options.stall_timeout_s),
        "timeout": timedelta(seconds=options.request_timeout_s),
        "pool_idle_timeout": timedelta(seconds=30),
    }
    once: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=options.request_timeout_s)}
    try:
        if address.has_listing:  # credentials and endpoint are read from the environment by the client
            client["allow_http"] = options.allow_plain_http or env.allow_plain_http_endpoint()
            return from_url(address.url, client_options=client, retry_config=once)
        client["allow_http"] = address.scheme == "http"  # else redirects must stay on https
        return HTTPStore(address.url, client_options=client, retry_config=once)
    except client_errors() as error:
        raise CorpusError(
            f"{address.url} cannot be opened: {failure_of(error).reason}", fix="Check the address."
        ) from None


def _identity(meta: Any) -> Identity:  # Any: obstore's ObjectMeta exists for type checkers only
    changed = meta["last_modified"]
    # A server that gives neither gets a time of 1970.
    dated = changed.isoformat() if changed is not None and changed.timestamp() > 0 else ""
    return Identity(meta["size"], meta["e_tag"] or dated)


def _stored(meta: Any) -> StoredObject:  # Any: as above
    changed = meta["last_modified"]
    return StoredObject(_identity(meta), changed.timestamp() if changed is not None else 0.0)


def _changed(address: Address, name: str, how: str) -> CorpusChanged:
    return CorpusChanged(
        f"{address.url}/{name} was replaced while it was being read: {how}",
        fix="Restore the object, or start again on the new corpus under another address.",
    )


def _given_up(
    address: Address, name: str, failure: Failure, *, attempts: int, passed_s: float
) -> CorpusError:
    what = f"{address.url}/{name}".rstrip("/")
    tries = "1 attempt" if attempts == 1 else f"{attempts} attempts in {passed_s:.0f} s"
    kind = Absent if failure.status in (403, 404) else CorpusError
    return kind(
        f"{what} cannot be read after {tries}: {failure.reason}",
        fix=failure.advice or "Check the network and the store's state, then run the same command again.",
    )
