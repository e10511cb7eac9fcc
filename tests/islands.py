"""Islands in tests: a tiny recipe, a run of it, and the papers' formulas as a plain loop over models."""

import dataclasses
import math

import torch
from torch.distributed.tensor import DTensor

from penstock.nn.dtensor import detached_local
from penstock.testing.corpora import write_corpus
from penstock.testing.training import records_of
from penstock.train.data_setup import train_loader
from penstock.train.islands.schedule import due, fragment_of
from penstock.train.loss import next_token_loss
from penstock.train.optim.learning_rate import learning_rate
from penstock.train.recipe.outer_config import OuterConfig
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state

VOCAB = 40
STEPS = 12


def counting_corpus(folder):
    """Documents that count up: there is something to learn."""
    documents = [[1 + (first * 7 + i) % (VOCAB - 1) for i in range(3 + first % 35)] for first in range(300)]
    return write_corpus(folder, documents, vocab_size=VOCAB)


def recipe_of(corpus, folder, *, parallel=None, **sections):
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": STEPS},
            "model": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
            },
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 16,
                "global_batch_size": 8,
                "holdout": 0.1,
            },
            "parallel": {"replicate": 2, **(parallel or {})},
            "optim": {"learning_rate": 3e-3, "clip_norm": 0.5},
            "compute": "float32",
            **sections,
        }
    )


def whole(tensors):
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def trained(recipe, world, *, stop_at=None):
    """Train; return the losses, and the run's and this island's own parameters."""
    state = open_state(recipe, world)
    records = records_of(state, recipe, world, stop_at=stop_at)
    own = whole(dict(state.model.named_parameters()))
    with state.shown():
        return records, whole(dict(state.model.named_parameters())), own


class PlainIslands:
    """Islands trained one after the other in one process, exchanging what the papers say.

    Args:
        recipe: of the run with islands of one rank each.
        shards: parts of an island, to each of which rows are dealt.
    """

    def __init__(self, recipe, world, *, islands, shards=1):
        alone = dataclasses.replace(
            recipe,
            parallel=dataclasses.replace(recipe.parallel, replicate=-1, shard=1),
            outer=OuterConfig(),
            run=dataclasses.replace(recipe.run, dir=recipe.run.dir + "-plain"),
        )
        self.recipe, self.outer = recipe, recipe.outer
        self.states = [open_state(alone, world) for _ in range(islands)]
        ranks = [range(first, first + shards) for first in range(0, islands * shards, shards)]
        self.loaders = [
            [train_loader(recipe, rank=rank, world_size=islands * shards) for rank in own] for own in ranks
        ]
        self.at = [{n: detached_local(p) for n, p in state.model.named_parameters()} for state in self.states]
        self.theta = {name: own.clone() for name, own in self.at[0].items()}
        self.momentum = {name: torch.zeros_like(own) for name, own in self.theta.items()}
        self.sent = {}

    def train(self):
        """Return the losses, and the outer weights at the end."""
        losses = []
        for step in range(1, self.recipe.run.steps + 1):
            batches = [[loader.batch_at(step - 1) for loader in own] for own in self.loaders]
            count = sum((batch["labels"] != -100).sum().item() for own in batches for batch in own)
            losses.append(sum(self.inner_step(i, own, count, step) for i, own in enumerate(batches)))
            now = due(self.outer, step, last=step == self.recipe.run.steps)
            for fragment in now.begin:
                self.arrive(fragment)
                self.sent[fragment] = self.moved(fragment)
            for fragment in now.arrive:
                self.arrive(fragment)
        return losses, {name: value.clone() for name, value in self.theta.items()}

    def inner_step(self, index, batches, count, step):
        state, total = self.states[index], 0.0
        for batch in batches:
            loss = state.model(
                batch["input_ids"],
                position_ids=batch["position_ids"],
                cu_seqlens=batch["cu_seqlens"],
                finish=next_token_loss(batch["labels"]),
            )
            (loss * len(self.at) / count).backward()
            total += loss.item()
        gradients = [detached_local(p.grad) for p in state.model.parameters()]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        for gradient in gradients if norm > self.recipe.optim.clip_norm else []:
            gradient.mul_(self.recipe.optim.clip_norm / (norm + 1e-6))
        schedule, peak = self.recipe.schedule, self.recipe.optim.learning_rate
        for group in state.optimizer.param_groups:
            group["lr"] = learning_rate(step - 1, peak=peak, steps=self.recipe.run.steps, schedule=schedule)
        state.optimizer.step()
        state.optimizer.zero_grad()
        return total / count

    def moved(self, fragment):
        names = [name for name in self.theta if fragment_of(name, self.outer.fragments) == fragment]
        return {n: torch.stack([self.theta[n] - own[n] for own in self.at]).mean(0) for n in names}

    def arrive(self, fragment):
        outer = self.outer
        for name, moved in self.sent.pop(fragment, {}).items():
            if outer.rule == "average":
                self.theta[name] -= moved
            else:
                self.momentum[name] = outer.momentum * self.momentum[name] + moved
                self.theta[name] -= outer.learning_rate * (moved + outer.momentum * self.momentum[name])
            for own in self.at:
                own[name].copy_(outer.mixing * own[name] + (1 - outer.mixing) * self.theta[name])


def losses_of(records):
    return [record["loss"] for record in records if "loss" in record]
