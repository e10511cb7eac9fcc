"""One turn of tune.py in a process of its own: trains, and prints a line of JSON.

python benchmarks/tune_worker.py WHO METHOD FOLDER STEPS ROWS LENGTH THREADS
"""

import json
import os
import resource
import shutil
import sys
import time
from importlib.metadata import version
from pathlib import Path

_FIRST = 2  # steps that are not measured
_TOGETHER = 3  # conversations in a micro-batch of TRL


def penstock(method, folder, *, steps, **_):
    """Return (tokens, padding, seconds) of the measured steps."""
    from penstock.cli.main import main
    from penstock.obs.meter import StepMeter
    from penstock.obs.sinks.jsonl import read_records

    stamps, finish = [], StepMeter.finish

    def finish_and_stamp(meter, **sizes):
        rates = finish(meter, **sizes)
        stamps.append(time.monotonic())
        return rates

    StepMeter.finish = finish_and_stamp
    run = folder / f"run-{method}"
    shutil.rmtree(run, ignore_errors=True)
    assert main(["tune", str(folder / f"{method}.toml")]) == 0
    records = [record for record in read_records(run / "metrics.jsonl") if "loss" in record]
    first, last = records[_FIRST - 1], records[-1]
    assert len(records) == len(stamps) == steps
    places = last["tokens"] - first["tokens"]
    padding = sum(last["corpus_padding"].values()) - sum(first["corpus_padding"].values())
    return places - padding, padding, stamps[-1] - stamps[_FIRST - 1]


def trl(method, folder, *, steps, rows, length, packs=False, **_):
    """Return the same of TRL's SFTTrainer.

    Its sampler makes a step's micro-batches, of `_TOGETHER` conversations on average, alike in cost: few long
    ones or many short ones. Packed, a micro-batch is one row.
    """
    import torch
    import transformers
    from datasets import load_dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    together, size = 1, rows
    if not packs:
        together = _TOGETHER
        size = max(1, round(conversations_a_step(folder, rows=rows, length=length) / together))
    stamps, counts = [], []

    class Note(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            stamps.append(time.monotonic())

    class Counting(SFTTrainer):
        def training_step(self, model, inputs, *others):
            ids = inputs["input_ids"]
            mask = inputs.get("attention_mask")
            counts.append((ids.numel(), ids.numel() if mask is None else int(mask.sum())))
            return super().training_step(model, inputs, *others)

    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if method == "lora" else None
    options = SFTConfig(
        output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=together,
        gradient_accumulation_steps=size, train_sampling_strategy="random" if packs else "batch_rebalance",
        max_length=length, packing=packs, packing_strategy="bfd", assistant_only_loss=True,
        learning_rate=1e-4, lr_scheduler_type="constant", optim="adamw_torch_fused",
        use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[],
        logging_strategy="no", disable_tqdm=True, dataloader_num_workers=1, dataloader_pin_memory=False,
        dataset_num_proc=1,
    )  # fmt: skip
    data = load_dataset("json", data_files=str(folder / "chats.jsonl"), split="train")
    trainer = Counting(
        model=model, args=options, train_dataset=data, processing_class=tokenizer, peft_config=adapter,
        callbacks=[Note()],
    )  # fmt: skip
    trainer.train()
    places, tokens = (sum(column) for column in zip(*counts[_FIRST * size :], strict=True))
    return tokens, places - tokens, stamps[-1] - stamps[_FIRST - 1]


def conversations_a_step(folder, *, rows, length):
    """Return the number of conversations with as many tokens as the rows of a packed step."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    lines = (folder / "chats.jsonl").read_text().splitlines()[:200]
    sizes = [len(tokenizer.apply_chat_template(json.loads(line)["messages"])["input_ids"]) for line in lines]
    return max(1, round(rows * length * len(sizes) / sum(sizes)))


def litgpt(method, folder, *, steps, rows, length, **_):
    """Return the same of the loop of `litgpt finetune_full` or `finetune_lora`: `fit` without logs.

    A micro-batch is one conversation, as it is by its own default.
    """
    import lightning
    import torch
    import transformers
    from litgpt import GPT, Config, lora
    from litgpt.data.base import get_sft_collate_fn
    from litgpt.utils import CycleIterator, chunked_cross_entropy, instantiate_torch_optimizer

    shape = json.loads((folder / "base" / "config.json").read_text())
    sizes = {
        "block_size": length, "n_layer": shape["num_hidden_layers"], "n_embd": shape["hidden_size"],
        "n_head": shape["num_attention_heads"], "vocab_size": shape["vocab_size"], "padding_multiple": 64,
        "rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP", "intermediate_size": shape["intermediate_size"],
    }  # fmt: skip
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="32-true")
    if method == "lora":
        names = ("query", "key", "value", "projection", "mlp")
        on = {f"lora_{name}": True for name in names}
        model = lora.GPT(lora.Config(**sizes, lora_r=16, lora_alpha=32, lora_dropout=0.0, **on))
        lora.mark_only_lora_as_trainable(model)
    else:
        model = GPT(Config(**sizes))
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(
        instantiate_torch_optimizer({"class_path": "torch.optim.AdamW", "init_args": {"fused": True}},
                                    model.parameters())
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    data = []
    for line in (folder / "chats.jsonl").read_text().splitlines():
        told = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        ids = torch.tensor(told["input_ids"][:length])
        labels = ids.masked_fill(torch.tensor(told["assistant_masks"][:length]) == 0, -100)
        counts = {"raw": len(ids), "raw_plus_prompt_template": len(ids)}
        data.append({"input_ids": ids, "labels": labels, "token_counts": counts})
    size = conversations_a_step(folder, rows=rows, length=length)
    batches = CycleIterator(
        torch.utils.data.DataLoader(
            data, batch_size=1, shuffle=True,
            collate_fn=get_sft_collate_fn(max_seq_length=length), num_workers=1,
        )
    )  # fmt: skip
    tokens = places = 0
    for step in range(steps):
        if step == _FIRST:
            tokens, places, begin = 0, 0, time.monotonic()
        for _ in range(size):
            batch = next(batches)
            logits = model(batch["input_ids"], lm_head_chunk_size=128)
            logits[-1] = logits[-1][..., :-1, :]
            loss = chunked_cross_entropy(logits, batch["labels"][..., 1:])
            fabric.backward(loss / size)
            places += batch["input_ids"].numel()
            tokens += int(batch["token_counts"]["raw"].sum())
        optimizer.step()
        optimizer.zero_grad()
    return tokens, places - tokens, time.monotonic() - begin


def work():
    """Train and print."""
    who, method, folder, steps, rows, length, threads = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = threads
    import torch

    torch.set_num_threads(int(threads))
    sizes = {"steps": int(steps), "rows": int(rows), "length": int(length)}
    work = {"penstock": penstock, "trl": trl, "litgpt": litgpt}[who.partition(",")[0]]
    options = {"packs": True} if who == "trl, packed" else {}
    tokens, padding, seconds = work(method, Path(folder), **sizes, **options)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures = {
        "tokens_per_s": tokens / seconds,
        "padding": padding / (tokens + padding),
        "peak_mib": peak_kib / 1024,
        "version": version(who.partition(",")[0]),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    work()
