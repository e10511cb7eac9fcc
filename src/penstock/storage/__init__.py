"""Storage of corpora and checkpoints: local folders, and object stores behind a block cache on disk.

    reader -> RemoteSlices -> RemoteBlob -> Fetcher -> Store (byte ranges, retries, identity)
                                        \\-> BlockCache (pages on disk, shared by processes)

A page is fetched once per machine, verified on its first read after a boot, and evicted when its next use is
farthest away. Decision: docs/adr/0007-block-cache.md.
"""
