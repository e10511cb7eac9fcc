"""The loss of conversations: packed rows count as single ones, all ranks and micro-batches as one batch."""

import numpy as np
import pytest
import torch
from tests.peft_loop import folder_of
from torch.nn import functional
from transformers import LlamaConfig

from penstock.checkpoint.tensors import held
from penstock.core.boxes import whole as full
from penstock.data import open_corpus
from penstock.models.decoder.model import Decoder
from penstock.parallel.adapters import add_adapters
from penstock.testing.corpora import write_corpus
from penstock.testing.ranks import on_ranks
from penstock.train.resolve.load import build_recipe
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


MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    config = LlamaConfig(**MODEL, vocab_size=VOCAB, max_position_embeddings=64, initializer_range=0.2)
    return folder_of(tmp_path_factory.mktemp("models") / "base", config)


def recipe_of(chats, folder, base, method):
    start = {"run": {"dir": str(folder), "steps": 4}, "model": MODEL}
    if method:
        tune = {"method": method, "rank": 4, "alpha": 8.0}
        start = {"run": {**start["run"], "start_from": str(base)}, "tune": tune}
    data = {"sequence_length": 24, "global_batch_size": 8, "micro_batch_size": 2}
    return build_recipe(
        {
            **start,
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


def plain_copy(state, recipe):
    """A model of one process with the weights of a run's."""
    model = Decoder(state.model.config)
    if recipe.adapter is not None:
        add_adapters(model, recipe.adapter, None, dtype=torch.float32)
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
    return float(total.detach() / count), [p.grad for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("method", [None, "lora", "dora"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_has_the_loss_and_gradients_of_its_conversations_one_by_one(
    chats, base, tmp_path, ranks, method
):
    """1e-5: float32 sums in another order. Rows hold uneven numbers of learned tokens."""
    recipe = recipe_of(chats, tmp_path, base, method)

    def both(world):
        torch.set_num_threads(1)
        state = open_state(recipe, world)
        for number, (name, parameter) in enumerate(state.model.named_parameters()):
            if name.endswith("lora_b"):  # zeros, with which A has no gradient
                generator = torch.Generator().manual_seed(number)
                some = torch.randn(parameter.shape, generator=generator) * 0.1
                held(name, parameter)[1].copy_(some[held(name, parameter)[0].within(full(parameter.shape))])
        expected = one_by_one(plain_copy(state, recipe), state.loader, open_corpus(chats))
        found = []
        state.optimizer.step = lambda *_, **__: found.extend(
            whole(parameter.grad) for parameter in state.model.parameters() if parameter.requires_grad
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
        assert all(gradient.any() for gradient in found), "each parameter learns"
        return result.loss, expected[0], worst, counts

    for loss, expected, worst, counts in on_ranks(both, ranks=ranks):
        assert loss == pytest.approx(expected, abs=1e-5)
        assert worst < 1e-5
        assert len(set(counts)) > 1, "the rows are uneven"
