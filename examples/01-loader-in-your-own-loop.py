"""Use the loader alone, in a training loop of your own; the state is a few integers.

Run it with the folder of a corpus:  python examples/01-loader-in-your-own-loop.py corpus
"""

import json
import sys

import torch

from penstock.data import Loader


def make_loader(corpus: str, rank: int, world_size: int, state: dict | None) -> Loader:
    """Open the loader for one rank, from the start or from a saved state."""
    loader = Loader(
        {"docs": corpus},
        weights={"docs": 1.0},
        sequence_length=64,
        global_batch_size=12,
        rank=rank,
        world_size=world_size,
        fields=("input_ids", "labels", "position_ids"),
    )
    if state is not None:
        loader.load_state_dict(state)
    return loader


def main(corpus: str) -> None:
    """Train on one rank, save, go on as if on three: no sample is lost or repeated."""
    loader = make_loader(corpus, rank=0, world_size=1, state=None)
    embed = torch.nn.Embedding(loader.corpora["docs"].manifest.vocab_size, 16)
    seen = []
    for batch in loader:
        hidden = embed(batch["input_ids"])  # your model, your loss
        assert hidden.shape[:2] == batch["labels"].shape
        seen += batch["sample_ids"].tolist()
        if loader.step == 5:
            break
    state = json.dumps(loader.state_dict())
    print(f"after step 5 the whole state is {len(state)} bytes: {state}")

    for rank in range(3):
        resumed = make_loader(corpus, rank=rank, world_size=3, state=json.loads(state))
        seen += next(iter(resumed))["sample_ids"].tolist()
    assert sorted(seen) == list(range(72)), "six steps of twelve, each sample once"
    print("one rank, then three: every sample once")


if __name__ == "__main__":
    main(sys.argv[1])
