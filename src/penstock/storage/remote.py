"""Remote storage: addresses to stores, objects to blobs over the cache."""

import json
from functools import partial
from secrets import token_hex
from threading import Lock
from weakref import WeakValueDictionary

from penstock.core.errors import CorpusError
from penstock.core.files import MANIFEST_FILE
from penstock.storage import address
from penstock.storage.block_checksums import BLOCK_BYTES, Check, Digests
from penstock.storage.block_checksums import FILE as CHECKSUMS
from penstock.storage.cache import cache_of, key_of_content
from penstock.storage.cache_region import PAGE_BYTES
from penstock.storage.object_store import Identity, Store
from penstock.storage.options import RemoteOptions
from penstock.storage.page_fetcher import Fetcher
from penstock.storage.remote_blob import Ahead, RemoteBlob

_MAX_MANIFEST_BYTES = 2**28  # a million shards; a manifest is read whole into memory


class RemoteStorage:
    """Objects below one address. Thread-safe; does not survive a fork.

    Raises:
        ConfigError: an invalid address, or one that is not allowed.
    """

    def __init__(self, location: str, options: RemoteOptions | None = None) -> None:
        options = options or RemoteOptions()
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
        self._own_tag = token_hex()  # numbers of processes and objects are given again

    @property
    def fetched_bytes(self) -> int:
        """Bytes that this process fetched from the store."""
        return self._store.fetched_bytes

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object below the folder, by relative name, in byte order.

        A web server has no listing: its manifest is used instead.

        Raises:
            CorpusError: the store does not answer, or there is neither a listing nor a manifest.
        """
        if self._store.address.has_listing:
            return self._store.sizes()
        manifest = self.open(MANIFEST_FILE)
        try:
            shards = json.loads(manifest.read(0, manifest.size))["shards"]
            found = {str(shard["name"]): int(shard["bytes"]) for shard in shards} | {
                MANIFEST_FILE: manifest.size
            }
        except (ValueError, KeyError, TypeError):
            raise CorpusError(
                f"{manifest.name} lists no shards, and a web server has no listing",
                fix="Serve a prepared corpus, or read it from an object store.",
            ) from None
        return dict(sorted(found.items(), key=lambda item: item[0].encode()))

    def open(self, name: str) -> RemoteBlob:
        """Open an object with one request for its identity, unless it is open already.

        Raises:
            CorpusError: it is missing, forbidden or too large, or the store does not answer.
        """
        if found := self._blobs.get(name):
            return found
        if (identity := self._known.get(name)) is None:  # known if a closed shard is opened again
            identity = self._known[name] = self._store.head(name)
        digests = self._all_digests()
        blob = self._blob(name, identity, digests.of(name, identity.size) if digests else None)
        if name == MANIFEST_FILE and blob.size > _MAX_MANIFEST_BYTES:
            raise CorpusError(
                f"{blob.name} has {blob.size:,} bytes, too many for a manifest", fix="Check the address."
            )
        return self._blobs.setdefault(name, blob)

    def _blob(self, name: str, identity: Identity, check: Check | None) -> RemoteBlob:
        url = f"{self.location}/{name}"
        # Without an identity, processes could not tell whether they mean the same version.
        tag = identity.tag or self._own_tag
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
        """Open the corpus's list of block checksums, once; most corpora have none."""
        with self._opening:
            if not self._looked:
                identity = self._store.find(CHECKSUMS)
                self._digests = Digests(self._blob(CHECKSUMS, identity, None)) if identity else None
                self._looked = True
            return self._digests
