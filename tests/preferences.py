"""Tiny corpora of preferences, and recipes that tune on them."""

import torch

from penstock.testing.corpora import write_corpus
from penstock.train.resolve.load import build_recipe

VOCAB = 48


def answers(number, *, seed=0):
    """Return pairs (prompt, chosen, rejected) of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def some(least, most):
        size = int(torch.randint(least, most, (1,), generator=generator))
        return torch.randint(1, VOCAB, (size,), generator=generator).tolist()

    return [(some(1, 5), some(1, 5), some(1, 5)) for _ in range(number)]


def pairs_corpus(folder, pairs):
    """Write pairs as a preference corpus."""
    documents = [prompt + chosen + prompt + rejected for prompt, chosen, rejected in pairs]
    learned = [[0] * len(p) + [1] * len(c) + [0] * len(p) + [1] * len(r) for p, c, r in pairs]
    rejected = [[0] * (len(p) + len(c)) + [1] * (len(p) + len(r)) for p, c, r in pairs]
    return write_corpus(
        folder, documents, vocab_size=VOCAB, columns={"learned": learned, "rejected": rejected}
    )


def thumbs_corpus(folder, pairs):
    """Write single answers, of which every other is wanted."""
    found = [(prompt, good if i % 2 else bad, not i % 2) for i, (prompt, good, bad) in enumerate(pairs)]
    return write_corpus(
        folder,
        [prompt + answer for prompt, answer, _ in found],
        vocab_size=VOCAB,
        columns={
            "learned": [[0] * len(prompt) + [1] * len(answer) for prompt, answer, _ in found],
            "rejected": [[bad] * len(prompt + answer) for prompt, answer, bad in found],
        },
    )


def recipe_of(corpus, start, run, tune, *, steps=4, rows=None, batch=12, rate=5e-3, holdout=0.2, **parallel):
    """Return a recipe that tunes on a corpus."""
    return build_recipe(
        {
            "run": {"dir": str(run), "steps": steps, "start_from": str(start)},
            "tune": tune,
            "data": {
                "corpora": {"c": {"path": str(corpus)}},
                "sequence_length": 24,
                "global_batch_size": batch,
                "micro_batch_size": rows,
                "packing": "whole",
                "overlong": "drop",
                "holdout": holdout,
            },
            "optim": {"learning_rate": rate, "weight_decay": 0.0},
            "schedule": {"rule": "constant"},
            "validate": {"every": 2 if holdout else 0, "samples": 7},
            "checkpoint": {"keep": 9},
            "parallel": parallel,
            "compute": "float32",
        }
    )
