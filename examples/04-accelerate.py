"""Train with Accelerate on Penstock's loader, which it saves and loads with the model.

Run it with the folder of a corpus:  python examples/04-accelerate.py corpus
"""

import sys
import tempfile
from itertools import islice

import torch
from accelerate import Accelerator

from penstock.data import Loader


def train(corpus: str, out: str, *, steps: int, resume: bool) -> list[int]:
    """Train so many steps, then save; return the samples seen."""
    accelerator = Accelerator(cpu=True)
    loader = Loader(
        {"docs": corpus},
        sequence_length=32,
        global_batch_size=4,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
    )
    vocab_size = loader.corpora["docs"].manifest.vocab_size
    net = torch.nn.Sequential(torch.nn.Embedding(vocab_size, 16), torch.nn.Linear(16, vocab_size))
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.register_for_checkpointing(loader)  # not prepared: it knows its rank and reads ahead itself
    if resume:
        accelerator.load_state(out)
    seen = []
    for batch in islice(loader, steps):
        logits = model(batch["input_ids"].to(accelerator.device)).mT
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"].to(accelerator.device))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen += batch["sample_ids"].tolist()
    accelerator.save_state(out)
    return seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out:
        first = train(sys.argv[1], out, steps=3, resume=False)
        second = train(sys.argv[1], out, steps=3, resume=True)
    assert sorted(first) == list(range(12)), "three steps of four"
    assert sorted(second) == list(range(12, 24)), "the next three"
    print("resumed at step 3: every sample once")
