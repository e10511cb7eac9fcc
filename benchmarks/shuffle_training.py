"""Does the order cost anything in training, on a corpus sorted by domain?

    python benchmarks/shuffle_training.py --out benchmarks/results      # about ten minutes on one core

Eight domains, each a random Markov chain over 32 tokens, one domain's documents after another's. A small
transformer is trained on one epoch in several orders: a perfect permutation of documents, Penstock's with
the loader's own pools and with pools made small, shards through a buffer of documents, and no shuffle.
Validation is on held-out rows of all domains alike. A seed keys the initial weights and the order together;
what must agree with the perfect order within the noise of seeds is Penstock's own pools.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import corpora
import drawing
import numpy as np
import orders
import torch
from results_file import file_result
from torch import nn
from torch.nn import functional

DOMAINS, VOCABULARY, SUCCESSORS = 8, 32, 4
LENGTH, ROWS, HIDDEN, LAYERS, HEADS = 64, 16, 64, 2, 4
EVERY = 20
SHARDS, BUFFER = 64, 500


def make_chains():
    """Return the transition tables [domains, tokens, tokens]: a few likely successors for each token."""
    rng = np.random.default_rng(7)
    tables = np.full((DOMAINS, VOCABULARY, VOCABULARY), 0.02 / VOCABULARY)
    for domain in range(DOMAINS):
        for token in range(VOCABULARY):
            chosen = rng.choice(VOCABULARY, SUCCESSORS, replace=False)
            tables[domain, token, chosen] += 0.98 * rng.dirichlet(np.ones(SUCCESSORS))
    return tables / tables.sum(axis=2, keepdims=True)


def sample(table, num_tokens, *, seed):
    """Return tokens of one chain: 64 of them side by side, then one after another."""
    rng = np.random.default_rng(seed)
    sums, width = np.cumsum(table, axis=1), 64
    state, out = rng.integers(0, VOCABULARY, width), []
    for _ in range(-(-num_tokens // width)):
        state = (sums[state] < rng.random(width)[:, None]).sum(axis=1).clip(max=VOCABULARY - 1)
        out.append(state)
    return np.stack(out, axis=1).reshape(-1)[:num_tokens]


def make_corpus(folder, num_tokens):
    """Write the corpus, sorted by domain; return document lengths, tokens and validation rows."""
    chains, lengths, tokens, held_out = make_chains(), [], [], []
    for domain in range(DOMAINS):
        part = num_tokens // DOMAINS
        lengths.append(corpora.lognormal_lengths(part, median=24, sigma=1.0, longest=2000, seed=domain))
        tokens.append(sample(chains[domain], part, seed=domain))
        held_out.append(sample(chains[domain], 24 * LENGTH, seed=1000 + domain).reshape(-1, LENGTH))
    tokens, lengths = np.concatenate(tokens), np.concatenate(lengths)
    corpora.write(folder, lengths, lambda start, stop: tokens[start:stop], shard_tokens=num_tokens // SHARDS)
    return lengths, tokens, torch.from_numpy(np.concatenate(held_out))


class Model(nn.Module):
    """A decoder-only transformer of 0.1 million parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.place = nn.Parameter(torch.randn(LENGTH, HIDDEN) * 0.02)
        layer = nn.TransformerEncoderLayer(
            HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, tokens):
        """Return the loss of predicting each next token of rows [batch, length]."""
        hidden = self.layers(self.embed(tokens) + self.place, mask=self.mask, is_causal=True)
        logits = self.head(hidden[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))


def train(rows, validation, *, seed):
    """Train on rows [n, length] in their order; return (steps, validation losses)."""
    torch.manual_seed(seed)
    model = Model()
    steps = len(rows) // ROWS
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20) * (1 - 0.9 * step / steps)
    )
    at, losses = [], []
    for step in range(steps):
        loss = model(rows[step * ROWS : (step + 1) * ROWS])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % EVERY == EVERY - 1 or step == steps - 1:
            with torch.no_grad():
                losses.append(float(model(validation)))
            at.append(float(step + 1))
    return at, losses


def make_orders(folder, lengths, *, seed):
    """Return name -> rows of positions."""
    arguments = {"length": LENGTH, "seed": seed}
    mine = {"packing": "concat", **arguments}  # as the others are: the question is the order
    return {
        "perfect document permutation": orders.perfect(lengths, **arguments),
        "Penstock": orders.ours(folder, **mine),
        "Penstock, small pools": orders.ours(folder, geometry=orders.small_geometry(LENGTH), **mine),
        f"shard buffer, {BUFFER} documents": orders.shard_buffer(
            lengths, shards=SHARDS, buffer=BUFFER, **arguments
        ),
        "no shuffle": orders.in_file_order(lengths, length=LENGTH),
    }


def measure(arguments, folder):
    """Return name -> per seed (steps, losses)."""
    lengths, tokens, validation = make_corpus(folder / "corpus", arguments.steps * ROWS * LENGTH)
    found = {}
    for seed in range(arguments.seeds):
        for name, places in make_orders(folder / "corpus", lengths, seed=seed).items():
            rows = torch.from_numpy(tokens[places].astype(np.int64))
            found.setdefault(name, []).append(train(rows, validation, seed=seed))
            print(f"seed {seed} {name:32} {found[name][-1][1][-1]:.4f}", flush=True)
    return found


def verdict(found):
    """Compare losses with the perfect order's, at nine tenths of the epoch and at its end.

    Both, because the end of an epoch is shuffled least: the last pools are too few to fill all lanes.
    """
    judged = {}
    for moment, share in (("at 90%", 0.9), ("at the end", 1.0)):
        losses = {name: [_loss_at(run, share) for run in runs] for name, runs in found.items()}
        perfect = losses["perfect document permutation"]
        noise = statistics.stdev(perfect) if len(perfect) > 1 else None
        means = {name: statistics.mean(several) for name, several in losses.items()}
        judged[moment] = {
            "seed_noise": noise,
            "mean": means,
            "less_perfect": {
                name: mean - means["perfect document permutation"] for name, mean in means.items()
            },
        }
    return judged


def _loss_at(run, share):
    at, losses = run
    return losses[max(0, int(np.searchsorted(at, at[-1] * share, side="right")) - 1)]


def drawn(found):
    """Return the loss curves: mean over seeds, band from least to greatest."""
    series = []
    for name, runs in found.items():
        curves = np.array([losses[: min(len(run[1]) for run in runs)] for run in runs for losses in [run[1]]])
        low, high = curves.min(axis=0).tolist(), curves.max(axis=0).tolist()
        x = runs[0][0][: curves.shape[1]]
        series.append(drawing.Line(name=name, x=x, y=curves.mean(axis=0).tolist(), low=low, high=high))
    title = "Validation loss by order, corpus sorted by domain"
    return {
        "loss": drawing.lines(title, series, x_label="step", y_label="nats per token"),
        "near": drawing.lines(
            f"{title}: the near ones", series[:3], x_label="step", y_label="nats per token", log_y=True
        ),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="one epoch of so many steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder to file the result in, as JSON and SVG")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments, Path(folder))
    judged = verdict(found)
    for moment, one in judged.items():
        print(f"\n{moment + ' of the epoch':34} {'loss':>8} {'less perfect':>13}   noise {one['seed_noise']}")
        for name, mean in one["mean"].items():
            print(f"{name:34} {mean:8.4f} {one['less_perfect'][name]:+13.4f}")
    if arguments.out:
        curves = {name: [{"steps": at, "loss": loss} for at, loss in runs] for name, runs in found.items()}
        settings = {"steps": arguments.steps, "seeds": arguments.seeds, "rows": ROWS, "length": LENGTH}
        result = {"settings": settings, "verdict": judged, "curves": curves}
        file_result(arguments.out, "shuffle_training", result, drawings=drawn(found), packages=("torch",))


if __name__ == "__main__":
    main()
