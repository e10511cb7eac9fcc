"""The loss of conversations: packed rows count as single ones, all ranks and micro-batches as one batch."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from penstock.data import open_corpus
from penstock.models.llama.model import Llama
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.train.recipe.load import build_recipe
from penstock.train.setup import open_state
from penstock.train.step import ControlFlags, train_step

VOCAB = 50


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Documents of 5 to 23 tokens; of some nearly all tokens are learned, of others the last alone."""
    random = np.random.default_rng(0)
    documents = [random.integers(1, VOCAB, int(n)).tolist() for n in random.integers(5, 24, 300)]
    learned = [
        [at > (1 if number % 3 else len(document) - 2) for at in range(len(document))]
        for number, document in enumerate(documents)
    ]
    folder = tmp_path_factory.mktemp("corpora") / "chats"
    return write_corpus(folder, documents, vocab_size=VOCAB, columns={"learned": learned})


def recipe_of(chats, folder):
    model = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    data = {"sequence_length": 24, "global_batch_size": 8, "micro_batch_size": 2}
    return build_recipe(
        {
            "run": {"dir": str(folder), "steps": 4},
            "model": {**model, "num_attention_heads": 4, "num_key_value_heads": 2},
            "data": {
                **data,
                "packing": "whole",
                "overlong": "drop",
                "corpora": {"chats": {"path": str(chats)}},
            },
            "optim": {"learning_rate": 1e-2, "clip_norm": 1e9},
            "checkpoint": {"every": 100},
            "compute": "float32",
        }
    )


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def plain_copy(state):
    """A model of one process with the weights of a run's."""
    model = Llama(state.model.config)
    held = {name: whole(parameter.detach()) for name, parameter in state.model.named_parameters()}
    model.load_state_dict(held, strict=False)
    return model


def one_by_one(model, loader, corpus):
    """Return the mean loss over the learned tokens of a step's documents, each alone, and its gradients."""
    total, count = torch.zeros(()), 0
    column = corpus.columns["learned"]
    for spans in loader.explain(loader.samples_of(0)):
        for span in spans:
            if span.document < 0:  # padding
                continue
            tokens = corpus.shard(corpus.shard_of_document(span.document)).tokens
            ids = torch.tensor(tokens[span.start : span.start + span.tokens].astype(np.int64))
            shard = corpus.shard_of_document(span.document)
            bits = column.values(shard, span.start, span.start + span.tokens)
            labels = torch.where(torch.from_numpy(bits.copy()), ids, -100)[1:]
            logits = model(ids[None])[0, :-1]
            total = total + functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            count += int((labels != -100).sum())
    (total / count).backward()
    return float(total.detach() / count), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_has_the_loss_and_gradients_of_its_conversations_one_by_one(chats, tmp_path, ranks):
    """1e-5: float32 sums in another order. Rows hold uneven numbers of learned tokens."""
    recipe = recipe_of(chats, tmp_path)

    def both(world):
        torch.set_num_threads(1)
        state = open_state(recipe, world)
        expected = one_by_one(plain_copy(state), state.loader, open_corpus(chats))
        found = []
        state.optimizer.step = lambda *_, **__: found.extend(
            whole(parameter.grad) for parameter in state.model.parameters()
        )
        batch = next(iter(state.loader))
        counts = (batch["labels"] != -100).sum(1).tolist()
        result = train_step(
            state,
            batch,
            world,
            micro_batch_size=2,
            clip_norm=1e9,
            asked=ControlFlags(stop=False),
        )
        worst = max(
            float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected[1], strict=True)
        )
        return result.loss, expected[0], worst, counts

    for loss, expected, worst, counts in on_ranks(both, ranks=ranks):
        assert loss == pytest.approx(expected, abs=1e-5)
        assert worst < 1e-5
        assert len(set(counts)) > 1, "the rows are uneven"
