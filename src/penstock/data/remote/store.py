"""One object store, asked for ranges of bytes: repeats what may pass, gives up on what will not.

Every answer is held against what was asked for: its range, its length, and the identity of its object.
The client (obstore, which is the Rust crate object_store) makes one attempt at a time and keeps the
connections; the repetitions are made here, where an error can name the object and the way out.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.core import clock, env
from penstock.core.errors import CorpusChanged, CorpusError
from penstock.data.remote.address import Address, check_name
from penstock.data.remote.digests import Check
from penstock.data.remote.options import RemoteOptions
from penstock.data.remote.retry import Failure, delay_s, failure_of
from penstock.data.remote.retry_after import retry_after_s
from penstock.data.storage import Absent

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

log = logging.getLogger(__name__)

_MOST_OBJECTS = 2_000_000  # in one corpus; a wrong prefix is found before it fills the memory
_MOST_WRONG = 4  # times that the bytes of one range are wrong before the object is taken to be
_client_pid: int | None = None  # the process whose threads serve the client; they do not survive a fork

T = TypeVar("T")


class WrongBytesError(OSError):
    """What came is not what was uploaded."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which content an object has; two reads with the same one see the same bytes."""

    size: int
    """Bytes."""
    tag: str
    """The store's ETag, or the time of the last change; empty where the store says neither."""


class Store:
    """The objects below one address. Thread-safe; nothing is sent before the first call."""

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
        library = _library(self.address)
        return self._repeat(name, lambda: _identity(library.head(self._client(), check_name(name))))

    def find(self, name: str) -> Identity | None:
        """Return an object's identity; None where it is missing, or hidden as S3 hides what is missing."""
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
        """Return bytes [start, stop) of an object that is still the one `identity` says.

        Args:
            check: holds the bytes against known checksums; wrong ones are fetched again.
            hint: whether to give up at the first failure.

        Raises:
            CorpusChanged: another object lies there now.
            CorpusError: as for `head`.
        """
        library = _library(self.address)
        strong = identity.tag.startswith('"')  # a weak one matches nothing in a condition

        def attempt() -> memoryview:
            options: dict[str, Any] = {"range": (start, stop)}  # Any: obstore's typed dict is import-only
            if strong:
                options["if_match"] = identity.tag
            answer = library.get(self._client(), check_name(name), options=options)
            if (now := _identity(answer.meta)) != identity:
                raise _changed(self.address, name, f"{identity} became {now}")
            content = memoryview(answer.bytes())
            if len(content) != stop - start:
                raise OSError(f"{len(content)} bytes came where {stop - start} were asked for")
            if check and not check(start, content):
                raise WrongBytesError(f"bytes {start} to {stop} do not have their checksums")
            self.fetched_bytes += len(content)
            return content

        return self._repeat(name, attempt, start=start, once=hint)

    def sizes(self) -> dict[str, int]:
        """Return the size of every object below the address, by relative name, in byte order.

        Raises:
            CorpusError: as for `head`, or there are too many.
        """
        library = _library(self.address)

        def attempt() -> dict[str, int]:
            found: dict[str, int] = {}
            for batch in library.list(self._client()):
                found |= {meta["path"]: meta["size"] for meta in batch}
                if len(found) > _MOST_OBJECTS:
                    raise CorpusError(
                        f"{self.address.url} holds more than {_MOST_OBJECTS:,} objects",
                        fix="Give the address of one corpus.",
                    )
            return dict(sorted(found.items(), key=lambda item: item[0].encode()))

        return self._repeat("", attempt)

    def _client(self) -> "ObjectStore":
        global _client_pid
        if _client_pid not in (None, os.getpid()):
            raise CorpusError(
                f"{self.address.url} was read before this process was forked, and connections do not fork",
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
            except Exception as error:
                if type(error).__name__ == "PreconditionError":
                    raise _changed(self.address, name, "the store holds another version") from None
                failure = failure_of(error)
                wrong += isinstance(error, WrongBytesError)
            if wrong >= _MOST_WRONG:
                advice = (
                    "The object is damaged in the store, or its checksums are another's: upload both again."
                )
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
                "remote read failed object=%s attempt=%d wait_s=%.2f reason=%s",
                f"{self.address.url}/{name}", attempts, wait_s, failure.reason,
                extra={
                    "told": f"{self.address.place} does not answer as it should; trying again for up to "
                    f"{options.deadline_s:.0f} s"
                },
            )  # fmt: skip
            clock.sleep(wait_s)

    def _asked_wait(self, name: str, failure: Failure) -> float | None:
        if not failure.overloaded or self.address.has_listing:
            return None
        return retry_after_s(self.address.url_of(name), timeout_s=self._options.connect_timeout_s)


def _library(address: Address) -> ModuleType:
    try:
        import obstore
    except ImportError:
        raise CorpusError(
            f"Reading {address.url} needs the package obstore", fix="pip install 'penstock[remote]'."
        ) from None
    return obstore


def _connect(address: Address, options: RemoteOptions) -> "ObjectStore":
    from obstore.store import HTTPStore, from_url

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
        client["allow_http"] = address.scheme == "http"  # else a redirect may not leave https either
        return HTTPStore(address.url, client_options=client, retry_config=once)
    except Exception as error:
        raise CorpusError(
            f"{address.url} cannot be opened: {failure_of(error).reason}", fix="Check the address."
        ) from None


def _identity(meta: Any) -> Identity:  # Any: obstore's ObjectMeta exists for type checkers only
    changed = meta["last_modified"]
    # A server that gives neither is shown as of 1970.
    dated = changed.isoformat() if changed is not None and changed.timestamp() > 0 else ""
    return Identity(meta["size"], meta["e_tag"] or dated)


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
