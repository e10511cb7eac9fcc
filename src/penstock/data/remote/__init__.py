"""Remote corpora: objects of S3, GCS, Azure or a web server, read through a cache of pages on local disk.

    reader -> RemoteSlices -> RemoteBlob -> Fetcher -> Store (ranges of bytes, retries, identity)
                                                   \\-> Cache of Regions (pages on disk, shared by processes)

A page is fetched once per machine, verified when it is first read after a boot, and evicted when its next
use is farthest away. The design and what it rejects: docs/adr/0007-block-cache.md.
"""

from penstock.data.remote.options import RemoteOptions
from penstock.data.remote.storage import RemoteStorage, storage_of

__all__ = ["RemoteOptions", "RemoteStorage", "storage_of"]
