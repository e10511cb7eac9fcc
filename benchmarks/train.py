"""What does Penstock's training step cost beside a plain loop and other trainers, and what memory?

    python benchmarks/train.py --out benchmarks/results

A tiny Llama in float32 on one thread, the same shape, batch, weights' count and AdamW for all:

    plain         a loop by hand around Penstock's network and loader, as few lines as it takes: whole logits
                  and torch's cross entropy
    plain, loss   the same loop with Penstock's loss
    penstock      `penstock.train.loop.train`: the same network and loss, with meters, records and checks
    compiled      the same with `compile.enabled` (--compile)
    transformers  Hugging Face Trainer with its Llama on rows of the same length, without documents
    litgpt        the loop of `litgpt pretrain` with its Llama, on such rows too

Settings take turns; figures are CPU seconds a step (process, all threads), medians over rounds, of the steps
between the first and the last of a turn: opening, saving and closing are not in it. `overhead` is
penstock beside plain with the same loss.

Memory is the most bytes of tensors alive in one step beyond weights and optimizer, and what the plan of
`--dry-run` says of the same; time is that of a step, as a share of that without recomputation.
"""

import argparse
import dataclasses
import logging
import statistics
import tempfile
import warnings
from contextlib import closing
from pathlib import Path

import torch
from results_file import file_result
from torch.nn import functional
from train_peers import PACKAGES, Turn, open_peers

from penstock.core import clock
from penstock.data.types import IGNORED_LABEL
from penstock.models.decoder.model import Decoder
from penstock.nn.init import init_weights
from penstock.obs.meter import StepMeter
from penstock.parallel.activation_checkpointing import recompute
from penstock.parallel.activation_checkpointing_plan import RecomputeConfig, plan
from penstock.parallel.layout import RankLayout
from penstock.parallel.mesh import join
from penstock.testing.corpora import write_corpus
from penstock.testing.step_memory import LiveBytes
from penstock.train.data_setup import train_loader
from penstock.train.loop import train
from penstock.train.loss import next_token_loss
from penstock.train.planning.memory import memory_plan
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

POLICIES = ("none", "operators", "every", "full")


def recipe_of(folder, corpus, arguments, **sections):
    """Return the recipe that all settings share."""
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 10**6},
            "model": {
                "hidden_size": arguments.hidden,
                "intermediate_size": 3 * arguments.hidden,
                "num_hidden_layers": arguments.layers,
                "num_attention_heads": arguments.hidden // 32,
                "vocab_size": arguments.vocabulary,
            },
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": arguments.length,
                "global_batch_size": arguments.rows,
            },
            "schedule": {"rule": "constant"},
            "compute": "float32",
            **sections,
        }
    )


def plain_loss(model, batch):
    """Whole logits and torch's cross entropy."""
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], cu_seqlens=batch["cu_seqlens"])
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED_LABEL
    )


def our_loss(model, batch):
    """Penstock's, as a mean."""
    finish = next_token_loss(batch["labels"])
    names = ("position_ids", "cu_seqlens")
    total = model(batch["input_ids"], finish=finish, **{name: batch[name] for name in names})
    return total / (batch["labels"] != IGNORED_LABEL).sum()


def plain(recipe, loss_of):
    """Return a function that trains so many steps in a loop by hand."""
    model = Decoder(recipe.model)
    init_weights(model, seed=0)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = iter(train_loader(recipe, rank=0, world_size=1, deliver="torch"))

    def turn(steps):
        note = Turn()
        for _ in range(steps):
            loss = loss_of(model, next(batches))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adamw.step()
            adamw.zero_grad()
            loss.item()
            note()
        return note.per_step()

    turn.close = batches.close
    return turn


def penstock(recipe, world):
    """Return a function that trains so many steps with Penstock's loop."""
    state = open_state(recipe, world)
    meter = StepMeter(flops_per_token=recipe.model.flops_per_token, peak_flops=1e12)

    def turn(steps):
        note = Turn()
        until = dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, steps=state.step + steps))
        train(
            state, until, world,
            meter=meter, stop_requested=lambda: False, sinks=[lambda _: None], on_batch=note,
        )  # fmt: skip
        return note.per_step()

    return turn


def speed(settings, arguments):
    """Return name -> CPU seconds a step of each turn, after one that does not count."""
    found = {name: [] for name in settings}
    for number in range(-1, arguments.rounds):
        for name, turn in settings.items():
            taken = turn(arguments.steps)
            if number >= 0:
                found[name].append(taken)
        print(f"round {number + 1} of {arguments.rounds}" if number >= 0 else "warmed up", flush=True)
    return found


def memory(recipe, arguments):
    """Return policy -> peak bytes of a step, those planned, and time as a share of no policy's."""
    with closing(iter(train_loader(recipe, rank=0, world_size=1, deliver="torch"))) as batches:
        batch = {name: value.clone() for name, value in next(batches).items() if torch.is_tensor(value)}
    turns, found = {}, {}
    for policy in POLICIES:
        model = Decoder(recipe.model)
        init_weights(model, seed=0)
        recompute(model, plan(RecomputeConfig(policy=policy), kept=[{}] * arguments.layers))

        def step(model=model):
            our_loss(model, batch).backward()
            for parameter in model.parameters():
                parameter.grad = None

        with LiveBytes() as seen:
            step()
        planned = memory_plan(
            dataclasses.replace(recipe, recompute=RecomputeConfig(policy=policy)), RankLayout()
        )
        in_step = planned.total - planned.weights - planned.optimizer - planned.gathered
        found[policy] = {"peak_bytes": seen.peak, "planned_bytes": in_step}
        turns[policy] = step
    times = {name: [] for name in turns}
    for _ in range(max(2, arguments.rounds)):
        for name, step in turns.items():
            start = clock.cpu_seconds()
            step()
            times[name].append(clock.cpu_seconds() - start)
    fastest = statistics.median(times["none"])
    for name, taken in times.items():
        found[name]["time_share"] = round(statistics.median(taken) / fastest, 3)
    return found


def run(arguments, folder):
    """Measure; return the result."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 600, (1500,), generator=generator).tolist()
    documents = [torch.randint(1, 500, (n,), generator=generator).tolist() for n in lengths]
    corpus = write_corpus(folder / "corpus", documents, vocab_size=500)
    recipe = recipe_of(folder / "run", corpus, arguments)
    with join() as world:
        torch.set_num_threads(1)
        by_hand = {"plain": plain(recipe, plain_loss), "plain, loss": plain(recipe, our_loss)}
        settings = {**by_hand, "penstock": penstock(recipe, world)}
        if arguments.compile:
            compiled = recipe_of(folder / "compiled", corpus, arguments, compile={"enabled": True})
            settings["compiled"] = penstock(compiled, world)
        if not arguments.no_peers:
            settings |= open_peers(recipe, folder)
        found = speed(settings, arguments)
        for turn in by_hand.values():
            turn.close()
    seconds = {name: statistics.median(taken) for name, taken in found.items()}
    tokens = arguments.rows * arguments.length
    pairs = zip(found["penstock"], found["plain, loss"], strict=True)
    return {
        "settings": {k: v for k, v in vars(arguments).items() if k != "out"},
        "tokens_per_cpu_s": {name: round(tokens / taken) for name, taken in seconds.items()},
        "time_share_of_plain": {name: round(taken / seconds["plain"], 3) for name, taken in seconds.items()},
        "overhead": round(statistics.median(ours / plainly for ours, plainly in pairs) - 1, 4),
        "memory": memory(recipe, arguments),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the result")
    for name, default in {
        "hidden": 256, "layers": 4, "vocabulary": 8192, "rows": 2, "length": 512, "steps": 5, "rounds": 5,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="also compiled blocks; a minute more")
    parser.add_argument("--no-peers", action="store_true", help="leave other trainers out")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        result = run(arguments, Path(folder))
    for name, value in result.items():
        print(f"{name}: {value}")
    if arguments.out:
        file_result(arguments.out, "train", result, packages=PACKAGES)


if __name__ == "__main__":
    main()
