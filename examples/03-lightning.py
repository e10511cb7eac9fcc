"""Train with Lightning on Penstock's loader; Lightning saves its state in the checkpoint by itself.

Run it with the folder of a corpus:  python examples/03-lightning.py corpus
"""

import sys
import tempfile

import lightning
import torch

from penstock.data import Loader
from penstock.data.torch_dataset import SizedBatches

STEPS = 6


class Model(lightning.LightningModule):
    """A model that notes which samples it saw."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Embedding(vocab_size, 16), torch.nn.Linear(16, vocab_size))
        self.seen: list[int] = []

    def training_step(self, batch, _):
        self.seen += batch["sample_ids"].tolist()
        return torch.nn.functional.cross_entropy(self.net(batch["input_ids"]).mT, batch["labels"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def fit(corpus: str, *, steps: int, resume: str | None = None) -> lightning.Trainer:
    """Train up to a step, from the start or from a checkpoint."""
    loader = Loader({"docs": corpus}, sequence_length=32, global_batch_size=4)  # rank=, world_size= as yours
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # the loader knows its rank
    )
    # SizedBatches has a length, so Lightning reads no batch ahead: what it saves is what was trained on.
    model = Model(loader.corpora["docs"].manifest.vocab_size)
    trainer.fit(model, SizedBatches(loader, STEPS), ckpt_path=resume, weights_only=True)
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out:
        first = fit(sys.argv[1], steps=3)
        first.save_checkpoint(f"{out}/three.ckpt")
        second = fit(sys.argv[1], steps=STEPS, resume=f"{out}/three.ckpt")
    assert sorted(first.model.seen) == list(range(12)), "three steps of four"
    assert sorted(second.model.seen) == list(range(12, 24)), "the next three"
    print("resumed at step 3: every sample once")
