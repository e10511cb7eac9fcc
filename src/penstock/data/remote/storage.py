"""A remote folder as a storage: addresses to stores, objects to blobs over the cache."""

import json
import os
from functools import partial
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from penstock.core.errors import CorpusError
from penstock.data.manifest import FILE
from penstock.data.remote import address
from penstock.data.remote.ahead import Ahead
from penstock.data.remote.blob import RemoteBlob
from penstock.data.remote.cache import cache_of, key_of_content
from penstock.data.remote.digests import BLOCK_BYTES, Check, Digests
from penstock.data.remote.digests import FILE as CHECKSUMS
from penstock.data.remote.fetcher import Fetcher
from penstock.data.remote.options import RemoteOptions
from penstock.data.remote.region import PAGE_BYTES
from penstock.data.remote.store import Identity, Store
from penstock.data.storage import LocalStorage, Storage

_MOST_MANIFEST_BYTES = 2**28  # a million shards; it is read whole into memory


def storage_of(location: str, options: RemoteOptions | None = None) -> Storage:
    """Return the storage of a corpus's location: a folder's path, or an address such as s3://bucket/web.

    Nothing is sent yet.

    Raises:
        ConfigError: an address that is not understood or not allowed.
    """
    if not address.is_remote(location) and "://" not in location:
        return LocalStorage(Path(location))
    return RemoteStorage(location, options or RemoteOptions())


class RemoteStorage:
    """The objects below one address. Thread-safe; does not survive a fork."""

    def __init__(self, location: str, options: RemoteOptions) -> None:
        place = address.parse(location, allow_plain_http=options.allow_plain_http)
        self.location = place.url
        self._options = options
        self._store = Store(place, options)
        self._cache = cache_of(options)
        self._ahead = Ahead(options.max_in_flight)
        self._blobs: WeakValueDictionary[str, RemoteBlob] = WeakValueDictionary()
        self._known: dict[str, Identity] = {}
        self._digests: Digests | None = None
        self._looked = False
        self._opening = Lock()

    @property
    def fetched_bytes(self) -> int:
        """Bytes that this process fetched from the store."""
        return self._store.fetched_bytes

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object below the folder, by relative name, in byte order.

        A web server has no listing: there the manifest says what there is.

        Raises:
            CorpusError: the store does not answer, or there is no listing and no manifest.
        """
        if self._store.address.has_listing:
            return self._store.sizes()
        manifest = self.open(FILE)
        try:
            shards = json.loads(manifest.read(0, manifest.size))["shards"]
            found = {str(shard["name"]): int(shard["bytes"]) for shard in shards} | {FILE: manifest.size}
        except (ValueError, KeyError, TypeError):
            raise CorpusError(
                f"{manifest.name} names no shards, and a web server lists none",
                fix="Serve a prepared corpus, or read it from an object store.",
            ) from None
        return dict(sorted(found.items(), key=lambda item: item[0].encode()))

    def open(self, name: str) -> RemoteBlob:
        """Open an object: one request that learns its identity, unless it is open already.

        Raises:
            CorpusError: it is missing, forbidden, too large for what it is, or the store does not answer.
        """
        if found := self._blobs.get(name):
            return found
        if (identity := self._known.get(name)) is None:  # else a shard that was closed is opened again
            identity = self._known[name] = self._store.head(name)
        digests = self._all_digests()
        blob = self._blob(name, identity, digests.of(name, identity.size) if digests else None)
        if name == FILE and blob.size > _MOST_MANIFEST_BYTES:
            raise CorpusError(
                f"{blob.name} has {blob.size:,} bytes, more than any manifest", fix="Check the address."
            )
        return self._blobs.setdefault(name, blob)

    def _blob(self, name: str, identity: Identity, check: Check | None) -> RemoteBlob:
        url = f"{self.location}/{name}"
        # Without an identity, another process could not tell whether it means the same content.
        tag = identity.tag or f"{os.getpid()}/{id(self)}"
        key = key_of_content(url, identity.size, tag)
        fetcher = Fetcher(
            self._cache,
            key=key,
            size=identity.size,
            get=partial(self._store.get, name, identity=identity, check=check),
            unit_pages=BLOCK_BYTES // PAGE_BYTES if check else 1,
            max_request_bytes=self._options.max_request_bytes,
            patience_s=self._options.stall_timeout_s,
        )
        return RemoteBlob(
            url,
            identity.size,
            cache=self._cache,
            key=key,
            fetcher=fetcher,
            read_around=self._options.read_around_bytes,
            ahead=self._ahead,
        )

    def _all_digests(self) -> Digests | None:
        """Open the list of the corpus's checksums, once; most corpora have none."""
        with self._opening:
            if not self._looked:
                identity = self._store.find(CHECKSUMS)
                self._digests = Digests(self._blob(CHECKSUMS, identity, None)) if identity else None
                self._looked = True
            return self._digests
