"""The loader under torch's DataLoader and torchdata's StatefulDataLoader, for code that insists on one.

The loader's own iterator is faster: worker processes cost more than they save where a batch is only read.

Run it with the folder of a corpus:  python examples/06-torch-dataloader.py corpus
"""

import sys
import warnings
from itertools import islice

from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from penstock.data import Loader
from penstock.data.torch_dataset import map_style, stream


def make_loader(corpus: str) -> Loader:
    return Loader({"docs": corpus}, sequence_length=32, global_batch_size=4)  # rank=, world_size= as yours


def make_stateful(loader: Loader, num_workers: int) -> StatefulDataLoader:
    return StatefulDataLoader(stream(loader), batch_size=None, num_workers=num_workers)


def ids(batches, count: int) -> list[int]:
    return [sample for batch in islice(batches, count) for sample in batch["sample_ids"].flatten().tolist()]


def main(corpus: str) -> None:
    # Samples by number, for a sampler of your own; without `Subset`, a whole epoch of them.
    samples = map_style(make_loader(corpus))
    first = Subset(samples, range(min(256, len(samples))))
    shuffled = ids(DataLoader(first, batch_size=16, shuffle=True, num_workers=2), len(first))
    assert sorted(shuffled) == list(range(len(first)))
    print(f"map style: {len(first)} samples of the {len(samples)} of an epoch, each once")

    # Whole batches, saved by the StatefulDataLoader; as many workers resume from its state.
    first = make_stateful(make_loader(corpus), num_workers=2)
    seen = ids(iter(first), 3)
    saved = first.state_dict()
    again = make_stateful(make_loader(corpus), num_workers=2)
    again.load_state_dict(saved)
    assert sorted(seen + ids(iter(again), 3)) == list(range(24)), "six steps of four"
    print("StatefulDataLoader: resumed at step 3, every sample once")

    # Another number of workers: through the loader's own state.
    loader = make_loader(corpus)
    loader.load_state_dict(stream(loader).loader_state(saved))
    assert sorted(seen + ids(iter(make_stateful(loader, num_workers=0)), 3)) == list(range(24))
    print("two workers, then none: every sample once")


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
    main(sys.argv[1])
