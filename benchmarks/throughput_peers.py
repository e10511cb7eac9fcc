"""Other loaders on the tokens of a Penstock corpus, in process, as their documentation shows them.

A peer is a function `(flat, folder, length, rows) -> work`: it may write its own copy of the tokens into
the folder, untimed; `work(num_tokens)` then delivers that many as batches [rows, length] int64 from a new
iterator and returns how many came. None shuffles documents or packs, but where its name says so: they
serve windows that were cut once. A peer that cannot be imported is left out, with a line that says so.
"""

import logging
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
from corpora import read_again

PACKAGES = ("torch", "torchdata", "mosaicml-streaming", "litdata", "grain")


def flat_tokens(corpus, path):
    """Write a corpus's tokens end to end into one raw file; return it as a memory map [tokens]."""
    with path.open("wb") as file:
        for index, entry in enumerate(corpus.manifest.shards):
            corpus.shard(index).tokens[0 : entry.tokens].tofile(file)
    read_again(path)
    return np.memmap(path, dtype=corpus.manifest.dtype, mode="r")


def stateful_dataloader(flat, folder, length, rows, *, shuffle=False):  # noqa: ARG001
    """A map-style dataset of windows of a memory map in torchdata's StatefulDataLoader, in process."""
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Windows(torch.utils.data.Dataset):
        def __init__(self):
            self.flat = np.memmap(flat.filename, dtype=flat.dtype, mode="r")

        def __len__(self):
            return len(self.flat) // length

        def __getitem__(self, index):
            return torch.from_numpy(self.flat[index * length : (index + 1) * length].astype(np.int64))

    def work(num_tokens):
        return _drain(
            StatefulDataLoader(Windows(), batch_size=rows, shuffle=shuffle, num_workers=0), num_tokens
        )

    return work


def stateful_dataloader_shuffled(flat, folder, length, rows):
    """The same with the windows in random order."""
    return stateful_dataloader(flat, folder, length, rows, shuffle=True)


def batch_hook(flat, length, rows, *, form, shuffle, labels):
    """The same with torch's hook for whole batches, `__getitems__`, in one of two forms.

    Labels are the same tokens shifted by one, a view, as nanoGPT's loader has them: not masked at document
    ends, and not contiguous.

    Args:
        form: "a copy a window": each window is widened into its row of the batch; "one gather": numpy gathers
            all windows of the batch, then widens them at once.
    """
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Windows(torch.utils.data.Dataset):
        def __init__(self):
            tokens = np.memmap(flat.filename, dtype=flat.dtype, mode="r").view(np.ndarray)
            every = np.lib.stride_tricks.sliding_window_view(tokens, length + labels)
            self.windows = every[::length]

        def __len__(self):
            return len(self.windows)

        def __getitems__(self, indices):
            if form == "one gather":
                batch = self.windows[indices].astype(np.int64)
            else:
                batch = np.empty((len(indices), length + labels), np.int64)
                for row, index in enumerate(indices):
                    batch[row] = self.windows[index]
            tokens = torch.from_numpy(batch)
            return (tokens[:, :-1], tokens[:, 1:]) if labels else (tokens,)

    def work(num_tokens):
        loader = StatefulDataLoader(
            Windows(), batch_size=rows, shuffle=shuffle, num_workers=0, collate_fn=lambda batch: batch
        )
        done = 0
        for batch in loader:
            done += batch[0].shape[0] * length
            if done >= num_tokens:
                break
        return done

    return work


def mosaicml_streaming(flat, folder, length, rows):
    """MDS shards of windows, StreamingDataset with its shuffle, in a torch DataLoader."""
    import torch
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    out = str(folder / "mds")
    with MDSWriter(out=out, columns={"tokens": f"ndarray:{flat.dtype}:{length}"}) as writer:
        for index in range(len(flat) // length):
            writer.write({"tokens": np.array(flat[index * length : (index + 1) * length])})
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=out, shuffle=True, batch_size=rows)

    def collate(samples):
        return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))

    def work(num_tokens):
        return _drain(torch.utils.data.DataLoader(dataset, batch_size=rows, collate_fn=collate), num_tokens)

    return work


def litdata(flat, folder, length, rows):
    """Chunks of tokens by `optimize` and TokensLoader, StreamingDataset with its shuffle."""
    os.environ.setdefault("DATA_OPTIMIZER_CACHE_FOLDER", str(folder / "lit-cache"))
    os.environ.setdefault("DATA_OPTIMIZER_DATA_CACHE_FOLDER", str(folder / "lit-data-cache"))
    import litdata as lit
    import torch

    out, size = str(folder / "lit"), length * 512
    lit.optimize(
        fn=LitChunk(str(flat.filename), str(flat.dtype), size),
        inputs=list(range(0, len(flat), size)),
        output_dir=out,
        chunk_size=length * 2048,
        item_loader=lit.TokensLoader(),
        num_workers=1,
        start_method="fork",
    )
    data = lit.StreamingDataset(
        out, item_loader=lit.TokensLoader(block_size=length), shuffle=True, drop_last=True
    )

    def collate(samples):
        return torch.stack([torch.as_tensor(sample) for sample in samples]).to(torch.int64)

    def work(num_tokens):
        loader = lit.StreamingDataLoader(data, batch_size=rows, num_workers=0, collate_fn=collate)
        return _drain(loader, num_tokens)

    return work


class LitChunk:
    """What litdata calls in its process: one input -> tokens."""

    def __init__(self, path, dtype, size):
        self.path, self.dtype, self.size = path, dtype, size

    def __call__(self, start):
        """Yield the tokens of one input, from position `start` on."""
        import torch

        part = np.fromfile(
            self.path, dtype=self.dtype, offset=start * np.dtype(self.dtype).itemsize, count=self.size
        )
        yield torch.from_numpy(part)


def grain_windows(flat, folder, length, rows):  # noqa: ARG001
    """Grain's MapDataset over windows of a memory map, shuffled, batched, read without threads."""
    import grain

    class Windows:
        def __len__(self):
            return len(flat) // length

        def __getitem__(self, index):
            return flat[index * length : (index + 1) * length].astype(np.int64)

    data = grain.MapDataset.source(Windows()).shuffle(seed=0).batch(rows)

    def work(num_tokens):
        return _drain(
            data.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=1)), num_tokens
        )

    return work


PEERS: dict[str, tuple[str, Callable]] = {
    "StatefulDataLoader, memory map, in file order": ("torchdata", stateful_dataloader),
    "StatefulDataLoader, memory map, windows shuffled": ("torchdata", stateful_dataloader_shuffled),
    "MosaicML streaming, windows shuffled": ("streaming", mosaicml_streaming),
    "litdata, windows shuffled": ("litdata", litdata),
    "grain, windows shuffled": ("grain", grain_windows),
}


def open_peers(flat, folder, *, length, rows):
    """Return name -> work of the peers that are installed; say which are not."""
    warnings.simplefilter("ignore")  # theirs, about interpreters and deprecations
    logging.disable(logging.WARNING)
    found = {}
    for name, (module, peer) in PEERS.items():
        if find_spec(module) is None:
            print(f"skipped: {name} ({module} is not installed)")
            continue
        try:
            found[name] = peer(flat, folder, length, rows)
        except Exception as error:  # a peer that breaks is a line in the report, not the end of the run
            print(f"skipped: {name} ({type(error).__name__}: {error})")
    return found


def _drain(loader, num_tokens):
    done = 0
    for batch in loader:
        done += batch.shape[0] * batch.shape[1]
        if done >= num_tokens:
            break
    return done
