"""Corpora behind a web server that fails at random, and a cache that is sometimes lost, for loader_stress."""

import os
import random
import shutil
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the faulty server of the tests

from tests.integration.remote.faulty import Reply, serving

from penstock.storage.block_checksums import write_block_checksums

REPLIES = {"500": Reply(500), "429": Reply(429, headers={"Retry-After": "0"})}
KINDS = ("reset", "truncate", "short", "flip", *REPLIES)


class BadStorage:
    """Where the corpora are, and what went wrong so far."""

    def __init__(self, url, cache):
        self.url = url
        self.counts = Counter()
        self._cache = cache

    def lose_cache(self):
        """Be a new machine: nothing is cached."""
        shutil.rmtree(self._cache, ignore_errors=True)
        self.counts["caches lost"] += 1


@contextmanager
def badly_served(folder, names, *, share, seed):
    """Serve corpora of a folder; a share of the requests for shards fails, each in a way chosen at random."""
    for name in names:
        shards = sorted(path.name for path in (folder / name).glob("*.arrow"))
        write_block_checksums(folder / name, shards)  # or a flipped byte would be served
    cache = folder / "cache"
    os.environ["PENSTOCK_CACHE"] = str(cache)
    chance, lock = random.Random(seed), threading.Lock()
    with serving(folder) as server:
        storage = BadStorage(server.url, cache)

        def fault(request):
            with lock:
                if not request.path.endswith(".arrow") or chance.random() >= share:
                    return None
                kind = chance.choice(KINDS)
                storage.counts[f"storage {kind}"] += 1
            return REPLIES.get(kind, kind)

        server.fault = fault
        yield storage
