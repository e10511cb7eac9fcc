"""Loaders as the torture script drives them: all ranks of a job in one process, states out, states in.

An adapter's `open(ranks, workers, states, weights)` returns one stream per rank; a stream yields
(tokens [n, length], sample ids [n] or None for the order given) and has `state()`. `states` are those of
the ranks before, however many they were; None starts from the beginning. Where a tool has no way to
resume on another number of ranks, the adapter does what its users do: rank r takes the state of rank
r modulo the old count. `mixes` and `adds` say whether weights can change, and a corpus join, at a resume.
"""

import json
import os
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import numpy as np


class PenstockAdapter:
    """Penstock's loader with its defaults: best_fit packing, documents shuffled."""

    mixes = adds = True
    module = "penstock"

    def __init__(self, job):
        self.job, self.present = job, list(job.first)

    def open(self, ranks, workers, states, weights):  # noqa: D102 of the protocol above
        from penstock.data import Loader

        loaders = [
            Loader(
                {name: self.job.corpora[name] for name in self.present},
                sequence_length=self.job.length,
                global_batch_size=self.job.rows,
                rank=rank,
                world_size=ranks,
                num_workers=workers,
                fields=("input_ids",),
                deliver="numpy",
            )
            for rank in range(ranks)
        ]
        for loader in loaders:
            if states:
                loader.load_state_dict(states[0])
            if weights:
                self._mix(loader, weights)
        if weights:
            self.present = list(weights)
        return [_PenstockStream(loader) for loader in loaders]

    def _mix(self, loader, weights):
        new = [name for name in weights if name not in loader.corpora]
        if new:
            loader.add_corpus(new[0], self.job.corpora[new[0]], weights=weights)
        else:
            loader.set_weights(weights)


class _PenstockStream:
    def __init__(self, loader):
        self.loader, self.batches = loader, iter(loader)

    def __next__(self):
        batch = next(self.batches)
        return batch["input_ids"].copy(), batch["sample_ids"]

    def state(self):
        return self.loader.state_dict()

    def close(self):
        self.batches.close()


class _Stream:
    """A peer's iterator, its state and what it needs around every call."""

    def __init__(self, batches, state, around=None):
        self.batches, self._state, self._around = batches, state, around

    def __next__(self):
        with self._around() if self._around else _nothing():
            batch = next(self.batches)
        return np.asarray(batch).reshape(len(batch), -1), None

    def state(self):
        with self._around() if self._around else _nothing():
            return self._state()

    def close(self):
        self.batches = None


@contextmanager
def _nothing():
    yield


class StatefulDataLoaderAdapter:
    """torchdata: StatefulDataLoader, StatefulDistributedSampler, fixed windows of a memory map."""

    mixes = adds = False
    module = "torchdata"

    def __init__(self, job):
        self.job, self.flat = job, job.flat()

    def open(self, ranks, workers, states, weights):  # noqa: ARG002, D102
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        data = _Windows(self.flat, self.job.length)
        streams = []
        for rank in range(ranks):
            sampler = StatefulDistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=True, seed=0)
            loader = StatefulDataLoader(
                data, batch_size=self.job.rows // ranks, sampler=sampler, num_workers=workers, drop_last=False
            )
            if states:
                loader.load_state_dict(states[rank % len(states)])
            streams.append(_Stream(iter(loader), loader.state_dict))
        return streams


class _Windows:
    def __init__(self, flat, length):
        self.flat, self.length = flat, length

    def __len__(self):
        return len(self.flat) // self.length

    def __getitem__(self, index):
        return self.flat[index * self.length : (index + 1) * self.length].astype(np.int64)


class GrainAdapter:
    """grain: mixed MapDatasets of fixed windows, shuffled, sliced by rank"""

    mixes = adds = True
    module = "grain"

    def __init__(self, job):
        self.job, self.flats = job, {name: job.flat(name) for name in job.corpora}

    def open(self, ranks, workers, states, weights):  # noqa: D102 of the protocol above
        import grain

        weights = weights or self.job.weights_so_far
        parts = [
            grain.MapDataset.source(_Windows(self.flats[name], self.job.length)).shuffle(seed=index)
            for index, name in enumerate(weights)
        ]
        data = grain.MapDataset.mix([part.repeat(None) for part in parts], list(weights.values()))
        streams = []
        for rank in range(ranks):
            mine = data[rank::ranks].batch(self.job.rows // ranks)
            options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(1, workers))
            batches = iter(mine.to_iter_dataset(options))
            if states:
                batches.set_state(states[rank % len(states)])
            streams.append(_Stream(batches, batches.get_state))
        return streams


class LitdataAdapter:
    """litdata: StreamingDataset of token chunks; it re-deals what is left when the ranks change.

    Its CombinedStreamingDataset mixes, but refuses to resume on other ranks, so mixing is left out.
    """

    mixes = adds = False
    module = "litdata"

    def __init__(self, job):
        import litdata
        from throughput_peers import LitChunk

        self.job, flat, size = job, job.flat(), job.length * 128
        self.out = str(job.folder / "lit")
        if not Path(self.out).exists():
            litdata.optimize(
                fn=LitChunk(str(flat.filename), "int32", size),  # it knows no uint32
                inputs=list(range(0, len(flat), size)),
                output_dir=self.out,
                chunk_size=size,
                item_loader=litdata.TokensLoader(),
                num_workers=1,
                start_method="fork",
            )

    def open(self, ranks, workers, states, weights):  # noqa: ARG002, D102
        import litdata

        streams = []
        for rank in range(ranks):
            around = _litdata_world(ranks, rank)
            with around():
                loading = litdata.TokensLoader(block_size=self.job.length)
                data = litdata.StreamingDataset(self.out, item_loader=loading, shuffle=True, drop_last=False)
                loader = litdata.StreamingDataLoader(
                    data, batch_size=self.job.rows // ranks, num_workers=workers
                )
                if states:
                    loader.load_state_dict(states[rank % len(states)])
                streams.append(_Stream(iter(loader), loader.state_dict, around))
        return streams


def _litdata_world(ranks, rank):
    from litdata.utilities import env

    @contextmanager
    def around():
        before = env._DistributedEnv.detect
        env._DistributedEnv.detect = classmethod(lambda cls: cls(ranks, rank, 1))
        try:
            yield
        finally:
            env._DistributedEnv.detect = before

    return around


class MosaicAdapter:
    """MosaicML streaming: StreamingDataset of fixed windows, each rank as a node of its own.

    Its streams can be re-weighted, which deals the whole epoch anew; mixing is left out.
    """

    mixes = adds = False
    module = "streaming"

    def __init__(self, job):
        from streaming import MDSWriter

        self.job, flat = job, job.flat()
        self.out = job.folder / "mds"
        if not self.out.exists():
            with MDSWriter(out=str(self.out), columns={"tokens": "bytes"}, size_limit=2**20) as writer:
                for index in range(len(flat) // job.length):
                    window = flat[index * job.length : (index + 1) * job.length]
                    writer.write({"tokens": window.tobytes()})

    def open(self, ranks, workers, states, weights):  # noqa: ARG002, D102
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        streams = []
        with _environment(WORLD_SIZE="1", RANK="0", LOCAL_WORLD_SIZE="1"):
            clean_stale_shared_memory()
        for rank in range(ranks):
            around = _mosaic_world(ranks, rank)
            copy = self.job.folder / f"mds-{os.getpid()}-{ranks}-{rank}"
            if not copy.exists():
                copy.symlink_to(self.out)
            with around():
                data = StreamingDataset(local=str(copy), shuffle=True, batch_size=self.job.rows // ranks)
                loader = StreamingDataLoader(
                    data, batch_size=self.job.rows // ranks, num_workers=workers, collate_fn=_from_bytes
                )
                if states:
                    loader.load_state_dict(states[rank % len(states)])
                streams.append(_Stream(iter(loader), loader.state_dict, around))
        return streams


def _from_bytes(samples):
    import torch

    rows = [np.frombuffer(sample["tokens"], dtype=np.uint32).astype(np.int64) for sample in samples]
    return torch.from_numpy(np.stack(rows))  # a tensor: of anything else it counts the columns as samples


@contextmanager
def _environment(**values):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_MOSAIC_NAMES = count(os.getpid() % 5000 * 100)


def _mosaic_world(ranks, rank):
    from streaming.base import dataset
    from streaming.base.shared import prefix

    dataset.maybe_init_dist = lambda: False  # the ranks are simulated: there is nobody to meet
    # Each looks for a free name in shared memory from 0 on and opens all it meets: 96 in a process, too many.
    prefix._each_prefix_int = partial(count, next(_MOSAIC_NAMES))
    return lambda: _environment(WORLD_SIZE=str(ranks), RANK=str(rank), LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")


ADAPTERS = {
    "Penstock": PenstockAdapter,
    "StatefulDataLoader": StatefulDataLoaderAdapter,
    "grain": GrainAdapter,
    "litdata": LitdataAdapter,
    "MosaicML streaming": MosaicAdapter,
}


def installed():
    """Return the names of the adapters whose packages are there; say which are not."""
    found = []
    for name, adapter in ADAPTERS.items():
        if find_spec(adapter.module) is None:
            print(f"skipped: {name} ({adapter.module} is not installed)")
        else:
            found.append(name)
    return found


def state_bytes(state):
    """Return the size of a state as JSON; what JSON cannot hold counts as its text."""
    return len(json.dumps(state, default=repr, separators=(",", ":")))
