"""Preference losses and their gradients against the trainers of TRL, on one tiny model and batch."""

import tempfile
from functools import cache
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig as HuggingFaceConfig
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from penstock.engine.model_runner.open import open_model
from penstock.train.step import loss_sum, micro_batches
from penstock.train.tune.kto import SingleAnswers
from penstock.train.tune.preference import PreferencePairs
from penstock.train.tune.preference_loss import PAIR_LOSSES
from penstock.train.tune.preference_objective import PreferenceObjective
from penstock.train.tune.reward_sums import RewardSums, reward_metrics

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and its libraries
CPU = torch.device("cpu")
EOS, PAD, VOCAB = 0, 1, 32
PAIRS = [
    {"prompt": "w1 w2 w3", "chosen": " w4 w5", "rejected": " w6 w7 w8"},
    {"prompt": "w9", "chosen": " w10", "rejected": " w11"},
    {"prompt": "w12 w13", "chosen": " w14 w15 w16 w17", "rejected": " w14 w15"},
    {"prompt": "w18 w19 w20 w21", "chosen": " w22", "rejected": " w23 w24"},
]
THUMBS = [
    {
        "prompt": pair["prompt"],
        "completion": pair["chosen" if index % 3 else "rejected"],
        "label": bool(index % 3),
    }
    for index, pair in enumerate(PAIRS)
]
QUIET = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 4,
    "disable_tqdm": True,
}


def tokenizer():
    words = ["<eos>", "<pad>", *(f"w{number}" for number in range(VOCAB - 2))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")


def network(seed):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        HuggingFaceConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def trl(kind, folder):
    """Return TRL's loss, its gradients and its metrics, with the policy of seed 0 and the reference of 1."""
    from datasets import Dataset  # dear: here only the worker that runs this file imports them
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    policy, reference = network(0), network(1)
    extra = {"processing_class": tokenizer()}
    if kind == "kto":
        args = KTOConfig(
            folder,
            beta=0.3,
            desirable_weight=1.2,
            undesirable_weight=0.7,
            train_sampling_strategy="sequential",
            **QUIET,
        )
        trainer = KTOTrainer(
            policy, ref_model=reference, args=args, train_dataset=Dataset.from_list(THUMBS), **extra
        )
    elif kind == "simpo":
        args = CPOConfig(
            folder, loss_type="simpo", beta=0.3, simpo_gamma=0.4, cpo_alpha=0.0, max_length=64, **QUIET
        )
        trainer = CPOTrainer(policy, args=args, train_dataset=Dataset.from_list(PAIRS), **extra)
    else:
        args = DPOConfig(folder, loss_type=["sigmoid" if kind == "dpo" else "ipo"], beta=0.3, **QUIET)
        trainer = DPOTrainer(
            policy, ref_model=reference, args=args, train_dataset=Dataset.from_list(PAIRS), **extra
        )
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in trainer.model.named_parameters()}
    found = (
        {name: values[-1] for name, values in trainer._metrics["train"].items()} if kind != "simpo" else {}
    )
    return loss.item(), gradients, found


def words(text):
    return [int(word[1:]) + 2 for word in text.split()]


def sides(kind):
    """Return each document as sides of (prompt, answer, whether it is rejected)."""
    if kind == "kto":
        return [[(words(e["prompt"]), [*words(e["completion"]), EOS], not e["label"])] for e in THUMBS]
    return [
        [
            (words(pair["prompt"]), [*words(pair[side]), EOS], side == "rejected")
            for side in ("chosen", "rejected")
        ]
        for pair in PAIRS
    ]


def batch_of(documents, *, length, each_row, reference):
    """Lay documents into rows, so many in each, with fields as the loader delivers them."""
    rows = [documents[first : first + each_row] for first in range(0, len(documents), each_row)]
    batch = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "labels": torch.full((len(rows), length), -100),
        "position_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "rejected": torch.zeros(len(rows), length, dtype=torch.bool),
        "reference": torch.zeros(len(rows), length),
    }
    ends = [0]
    for row, inside in enumerate(rows):
        at = 0
        for document in inside:
            tokens = [token for prompt, answer, _ in document for token in prompt + answer]
            learned = [bit for prompt, answer, _ in document for bit in [0] * len(prompt) + [1] * len(answer)]
            rejected = [bit for prompt, answer, bit in document for _ in prompt + answer]
            past = at + len(tokens)
            batch["input_ids"][row, at:past] = torch.tensor(tokens)
            batch["position_ids"][row, at:past] = torch.arange(len(tokens))
            next_token = torch.tensor(tokens[1:])
            batch["labels"][row, at : past - 1] = next_token.where(torch.tensor(learned[1:]).bool(), -100)
            batch["rejected"][row, at : past - 1] = torch.tensor(rejected[1:]).bool()
            start = at
            for prompt, answer, _ in document:
                ids = torch.tensor(prompt + answer)
                with torch.no_grad():
                    found = reference(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
                batch["reference"][row, start : start + len(ids) - 1] = found
                start += len(ids)
            at = past
            ends.append(row * length + at)
        if at < length:
            ends.append((row + 1) * length)
    return {**batch, "cu_seqlens": torch.tensor(ends, dtype=torch.int32)}


def divergence():
    """Return KTO's z: the mean log-ratio of each prompt with the answer of the example before it."""
    examples = [document[0] for document in sides("kto")]
    found = []
    for (prompt, _, _), (_, answer, _) in zip(examples, examples[-1:] + examples[:-1], strict=True):
        ids = torch.tensor(prompt + answer)
        each = []
        for seed in (0, 1):
            with torch.no_grad():
                logits = network(seed)(ids[None]).logits[0].log_softmax(-1)
            each.append(logits[:-1].gather(1, ids[1:, None])[len(prompt) - 1 :, 0].sum())
        found.append(each[0] - each[1])
    return max(float(torch.stack(found).mean()), 0.0)


@cache
def opened():
    folder = tempfile.mkdtemp()
    network(0).save_pretrained(folder)
    return folder


def ours(kind, *, each_row, rows):
    """Return our loss, gradients by TRL's names, and metrics."""
    model, _ = open_model(Path(opened()))
    model = model.float().train()
    if kind == "kto":
        answers = SingleAnswers(0.3, 1.2, 0.7)
    else:
        answers = PreferencePairs(PAIR_LOSSES[kind], 0.3, 0.4, has_reference=kind != "simpo")
    objective = PreferenceObjective(answers)
    batch = batch_of(sides(kind), length=32, each_row=each_row, reference=network(1))
    answers.check(batch)
    sums = RewardSums(CPU)
    sums.divergence = divergence() if kind == "kto" else 0.0
    count = objective.count(batch, slice(None))
    assert count == 4
    total = 0.0
    for part in micro_batches(
        batch, rows=rows, device=CPU, fields=objective.fields, prepare=objective.prepare
    ):
        loss = loss_sum(model, part, objective.finish(part, sums)) / count
        loss.backward()
        total += loss.item()
    stored = model.config.stored_rows
    gradients = {stored[name].tensor: parameter.grad for name, parameter in model.named_parameters()}
    return total, gradients, reward_metrics(sums.sums.tolist())


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    """TRL counts its users in a thread of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return cache(lambda kind: trl(kind, str(tmp_path_factory.mktemp(kind))))


@pytest.mark.parametrize(("each_row", "rows"), [(1, 4), (1, 3), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["dpo", "ipo", "simpo", "kto"])
def test_loss_gradients_and_rewards_are_those_of_trl(theirs, kind, each_row, rows):
    """Packed or not, in even or uneven micro-batches; 1e-5 in float32."""
    loss, gradients, metrics = theirs(kind)
    found, own, rewards = ours(kind, each_row=each_row, rows=rows)
    assert found == pytest.approx(loss, abs=1e-5)
    assert own.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(own[name], gradient, rtol=1e-4, atol=1e-5)
    for side in ("chosen", "rejected"):
        if f"rewards/{side}" in metrics:
            assert rewards[f"reward_{side}"] == pytest.approx(metrics[f"rewards/{side}"], abs=1e-5)
            assert rewards[f"log_prob_{side}"] == pytest.approx(metrics[f"logps/{side}"], rel=1e-5)
