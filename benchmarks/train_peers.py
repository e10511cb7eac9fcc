"""Other trainers on the shape and the batch of a recipe of Penstock, each as its documentation shows it.

A peer is a function `(recipe, folder) -> turn`: `turn(steps)` trains so many steps more and returns the CPU
seconds a step. Rows are of the same length, without documents; each trainer keeps its own loss, clipping
and bookkeeping, and logs nothing. A peer that cannot be imported is left out, with a line that says so.
"""

import contextlib
import io

import torch

from penstock.core import clock

PACKAGES = ("torch", "transformers", "accelerate", "litgpt", "lightning")


class Turn:
    """Notes the time of each step of a turn."""

    def __init__(self):
        self.stamps = []

    def __call__(self, *_):
        """Note the end of a step."""
        self.stamps.append(clock.cpu_seconds())

    def per_step(self):
        """Return CPU seconds a step, the first left out."""
        return (self.stamps[-1] - self.stamps[0]) / (len(self.stamps) - 1)


def transformers_trainer(recipe, folder):
    """Hugging Face's Trainer with its Llama."""
    import transformers

    shape = recipe.model
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=shape.vocab_size, hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size, num_hidden_layers=shape.num_hidden_layers,
            num_attention_heads=shape.num_attention_heads,
            max_position_embeddings=shape.max_position_embeddings,
        )
    )  # fmt: skip
    rows = torch.randint(0, shape.vocab_size, (64, recipe.data.sequence_length))
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    note = Turn()

    class Note(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            note()

    def turn(steps):
        note.stamps.clear()
        options = transformers.TrainingArguments(
            output_dir=str(folder), max_steps=steps,
            per_device_train_batch_size=recipe.data.global_batch_size,
            use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True, logging_strategy="no",
            optim="adamw_torch_fused", lr_scheduler_type="constant", weight_decay=0.1,
            dataloader_pin_memory=False,
        )  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            transformers.Trainer(model, options, train_dataset=dataset, callbacks=[Note()]).train()
        return note.per_step()

    return turn


def litgpt_pretrain(recipe, folder):
    """The loop of `litgpt pretrain` with its Llama, on Fabric; a step ends where the next asks for rows."""
    import lightning
    import litgpt
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.pretrain import fit

    shape, rows, length = recipe.model, recipe.data.global_batch_size, recipe.data.sequence_length
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="32-true")
    config = litgpt.Config(
        block_size=length, n_layer=shape.num_hidden_layers, n_embd=shape.hidden_size,
        n_head=shape.num_attention_heads, vocab_size=shape.vocab_size, padded_vocab_size=shape.vocab_size,
        intermediate_size=shape.intermediate_size, mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm",
        rotary_percentage=1.0, parallel_residual=False, bias=False,
    )  # fmt: skip
    model = fabric.setup(litgpt.GPT(config))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    state = {"model": model, "optimizer": fabric.setup_optimizers(adamw), "step_count": 0}
    dataset = torch.randint(0, shape.vocab_size, (32, rows, length + 1))
    note = Turn()

    def batches():
        for batch in dataset:
            note()
            yield batch

    def turn(steps):
        options = TrainArgs(
            global_batch_size=rows, micro_batch_size=rows, max_tokens=(steps + 1) * rows * length,
            max_norm=1.0, min_lr=3e-4, lr_warmup_steps=None, save_interval=None, log_interval=10**9,
        )  # fmt: skip
        never = EvalArgs(interval=10**9, max_iters=0, final_validation=False)
        note.stamps.clear()
        state["iter_num"] = 0
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            fit(fabric, 1, state, Stream(batches), dataset[:1], folder, None, options, never)
        note.stamps.pop(0)  # as the others: the first step is not counted
        return note.per_step()

    return turn


class Stream:
    """What a function yields, from anew for every `iter`."""

    def __init__(self, function):
        self._function = function

    def __iter__(self):
        return self._function()


PEERS = {"transformers": transformers_trainer, "litgpt": litgpt_pretrain}


def open_peers(recipe, folder):
    """Return name -> turn of the peers that can be imported; print the others."""
    opened = {}
    for name, open_peer in PEERS.items():
        try:
            opened[name] = open_peer(recipe, folder / name)
        except ImportError as error:
            print(f"{name} is left out: {error}")
    return opened
