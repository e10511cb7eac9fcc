"""The order of a running job never changes: batches written down once, on both sides of an epoch's end.

A failure here means that every checkpoint out there would resume on other data. If that is meant, raise
the state's VERSION, say so in the changelog, and run `pytest --update-golden`.
"""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data import Loader
from penstock.data.packing import PACKERS, PADDING_RULES
from penstock.testing.corpora import numbered_corpus

LENGTHS = {  # empty, one-token and long documents; two lanes and a single pool
    "web": [(17 * i) % 61 if i % 50 else 700 for i in range(600)],
    "code": [(29 * i) % 83 for i in range(40)],
}
BATCH, STEPS_EACH = 16, 6


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("corpora")
    return {
        name: numbered_corpus(folder / name, lengths, documents_per_shard=70)
        for name, lengths in LENGTHS.items()
    }


def crc(array: np.ndarray) -> str:
    return f"{zlib.crc32(array.astype('<i8').tobytes()):08x}"


def story(corpora: dict[str, Path], **options: Any) -> dict[str, Any]:
    """Return what a loader serves at its start and around the end of its first epoch, and its state then."""
    loader = Loader(
        corpora,
        sequence_length=8,
        global_batch_size=BATCH,
        fields=("input_ids", "labels", "cu_seqlens"),
        num_workers=0,
        deliver="numpy",
        **options,
    )
    samples_in_all = sum(loader.samples_per_epoch.values())
    boundary = samples_in_all // BATCH - STEPS_EACH // 2
    batches = {}
    for first in (0, boundary):
        for step in range(first, first + STEPS_EACH):
            batch = loader.batch_at(step)
            sums = " ".join(crc(batch[name]) for name in ("input_ids", "labels", "cu_seqlens"))
            batches[str(step)] = f"{' '.join(map(str, batch['sample_ids'].tolist()))} | {sums}"
    batches_taken = iter(loader)
    for _ in range(3):
        next(batches_taken)
    state = json.loads(json.dumps(loader.state_dict()))
    del state["checksum"]  # over fingerprints, too
    for name, entry in state["corpora"].items():  # a hash of files, which another pyarrow may write otherwise
        assert entry.pop("fingerprint") == loader.corpora[name].fingerprint
    return {"samples_per_epoch": loader.samples_per_epoch, "batches": batches, "state": state}


def test_the_order_of_running_jobs_does_not_change(
    corpora: dict[str, Path], golden: Callable[[str, Any], None]
) -> None:
    web = {"web": corpora["web"]}
    found = {}
    for rule in PACKERS:
        how = {"packing": rule, "overlong": "truncate" if rule in PADDING_RULES else None}
        found[f"one corpus, {rule}"] = story(web, **how)
        found[f"two corpora, {rule}"] = story(corpora, weights={"web": 5, "code": 1}, seed=3, **how)
    found["second of two ranks"] = story(web, rank=1, world_size=2)
    found["training part"] = story(web, holdout=0.1)
    found["held-out part"] = story(web, holdout=0.1, split="heldout")
    golden("loader_order.json", found)


def test_the_golden_order_crosses_an_epoch_and_uses_several_lanes(corpora: dict[str, Path]) -> None:
    told = story({"web": corpora["web"]})
    per_epoch = told["samples_per_epoch"]["web"]
    ids = {int(i) for batch in told["batches"].values() for i in batch.split("|")[0].split()}
    assert {per_epoch - 1, per_epoch} <= ids
    assert told["state"]["corpora"]["web"]["V"] > 1
