"""Train with transformers.Trainer on Penstock's loader; a checkpoint resumes without losing a sample.

Run it with the folder of a corpus:  python examples/02-transformers-trainer.py corpus
"""

import json
import sys
import tempfile
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from penstock.data import Loader


class LoaderTrainer(Trainer):
    """A Trainer that takes its batches from a loader as they are: it already knows its rank."""

    def __init__(self, *args, loader, **options):
        super().__init__(*args, callbacks=[SaveLoader(loader)], **options)
        self.loader, self.seen = loader, []

    def get_train_dataloader(self):
        return self.loader

    def training_step(self, model, inputs, *args):
        self.seen += inputs.pop("sample_ids").tolist()
        return super().training_step(model, inputs, *args)


class SaveLoader(TrainerCallback):
    """Keeps the loader's state in every checkpoint; it is the same on all ranks."""

    def __init__(self, loader):
        self.loader = loader

    def on_save(self, args, state, *_, **__):
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))


def train(corpus: str, out: str, *, steps: int, resume: Path | None = None) -> list[int]:
    """Train up to a step; return the samples seen."""
    options = {"save_steps": 3, "ignore_data_skip": True, "report_to": [], "use_cpu": True}
    loader = Loader({"docs": corpus}, sequence_length=32, global_batch_size=4)  # rank=, world_size= as yours
    if resume:
        loader.load_state_dict(json.loads((resume / "loader.json").read_text()))
    vocab_size = loader.corpora["docs"].manifest.vocab_size
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **shape))
    trainer = LoaderTrainer(model, TrainingArguments(out, max_steps=steps, **options), loader=loader)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer.seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out:
        train(sys.argv[1], out, steps=3)
        seen = train(sys.argv[1], out, steps=6, resume=Path(out) / "checkpoint-3")
    assert sorted(seen) == list(range(12, 24)), "steps 3 to 5: each sample once"
    print("resumed at step 3: every sample once")
