"""Check: speed of an object store, with the credentials in the environment."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

from penstock.core import clock, env
from penstock.core.errors import PenstockError, UsageError
from penstock.core.units import mib
from penstock.doctor.checks.check import CheckOptions, Finding, green, yellow
from penstock.storage import address
from penstock.storage.retry import client_errors, failure_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore


CHECK = "object store"

_OBJECT_BYTES = 2**23
_AT_ONCE = 8
_MAX_OBJECTS = 32
_MAX_S = 5.0
"""Seconds of uploading; the objects are then read once."""
_TIMEOUT_S = 30.0
_SLOW_BYTES_S = 50e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStoreFacts:
    """Speed of one address in an object store."""

    url: str
    written_bytes_s: float = 0.0
    read_bytes_s: float = 0.0
    first_byte_s: float = 0.0
    """Time from requesting one byte to receiving it."""


def measure(options: CheckOptions) -> ObjectStoreFacts | None:
    """Write, read and delete some objects; None if no store was given.

    Raises:
        UsageError: not the address of a writable store.
        PenstockError: the store refuses, or does not answer.
    """
    if not options.store:
        return None
    place = place_of(options.store)
    prefix = f"penstock-doctor-{uuid4().hex}"
    try:
        store = _connect(place.url)
        return _measure(place.url, store, prefix)
    except ImportError:
        raise PenstockError(
            f"{place.url} needs the package obstore", fix="pip install 'penstock[remote]'."
        ) from None
    except client_errors() as error:
        failure = failure_of(error)
        raise PenstockError(
            f"{place.url}: {failure.reason}",
            fix=failure.advice or "Check the address, the credentials and the network.",
        ) from None


def place_of(store: str) -> address.Address:
    """Return the place that an address of `--store` names.

    Raises:
        UsageError: not the address of a store that can be written.
        ConfigError: it holds a user or a query, or no bucket.
    """
    if not address.is_remote(store) or not (place := address.parse(store)).has_listing:
        raise UsageError(
            "--store must be an object store that can be written",
            got=store.partition("://")[0],  # the rest may hold a secret
            fix="Give an address that begins with s3://, gs:// or az://.",
        )
    return place


def _measure(url: str, store: "ObjectStore", prefix: str) -> ObjectStoreFacts:
    import obstore

    content = bytes(_OBJECT_BYTES)
    written: list[str] = []

    def write(index: int) -> None:
        name = f"{prefix}/{index}"
        if clock.monotonic() - start < _MAX_S:
            written.append(name)  # before it is there, so that a failed one is deleted too
            obstore.put(store, name, content, use_multipart=False)

    try:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            start = clock.monotonic()
            list(pool.map(write, range(_MAX_OBJECTS)))
            write_s = clock.monotonic() - start
            start = clock.monotonic()
            sizes = list(pool.map(lambda name: len(obstore.get(store, name).bytes()), written))
            read_s = clock.monotonic() - start
        start = clock.monotonic()
        obstore.get_range(store, written[0], start=0, end=1)
        first_s = clock.monotonic() - start
    finally:
        if written:
            obstore.delete(store, written)
    return ObjectStoreFacts(
        url=url,
        written_bytes_s=len(written) * _OBJECT_BYTES / write_s,
        read_bytes_s=sum(sizes) / read_s,
        first_byte_s=first_s,
    )


def _connect(url: str) -> "ObjectStore":
    from obstore.store import from_url

    return from_url(
        url,
        client_options={
            "connect_timeout": timedelta(seconds=10),
            "timeout": timedelta(seconds=_TIMEOUT_S),
            "allow_http": env.allow_plain_http_endpoint(),
        },
        retry_config={"max_retries": 1, "retry_timeout": timedelta(seconds=_TIMEOUT_S)},
    )


def judge(facts: ObjectStoreFacts | None) -> Iterator[Finding]:
    """Say what checkpoints and corpora there can expect."""
    if facts is None:
        return
    yield green(
        f"{facts.url}: writes {mib(facts.written_bytes_s)}/s, reads {mib(facts.read_bytes_s)}/s, "
        f"first byte after {1000 * facts.first_byte_s:.0f} ms"
    )
    if min(facts.written_bytes_s, facts.read_bytes_s) < _SLOW_BYTES_S:
        yield yellow(
            f"{facts.url} gives or takes less than {mib(_SLOW_BYTES_S)}/s",
            remedy="Use a bucket of the same region; keep corpora in the cache of a local disk.",
        )
