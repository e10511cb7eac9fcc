"""A step on conversations against TRL's SFTTrainer and PEFT: from one file of chats to loss and gradients.

Ours packs the chats, several to a row, a row to a micro-batch. TRL's has one chat to a row, two to a
micro-batch. Both divide by the learned tokens of the whole step.
"""

import json

import huggingface_hub
import pytest
import torch
from peft import LoraConfig
from tests.peft_loop import PROJECTIONS, folder_of, peft_names
from tests.published_templates import CHATML
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from penstock.checkpoint.tensors import held
from penstock.cli.main import main
from penstock.testing.ranks import on_ranks
from penstock.text.tokenizer import train_tokenizer
from penstock.train.resolve.load import build_recipe
from penstock.train.setup import open_state
from penstock.train.step import ControlFlags, train_step

pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL and its libraries
TALKS = [
    ["What is 3 plus 4?", "It is 7.", "And 5 more?", "Then it is 12."],
    ["How is the weather?", "Warm, and a little windy in the afternoon."],
    ["Hello.", "Hello! Ask me something."],
    ["The key of Lomar?", "amber"],
]
ROWS = 2


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch):
    """TRL counts its users in a thread of its own."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A base with a tokenizer and a template, chats in a file, and the corpus that is made of them."""
    where = tmp_path_factory.mktemp("chats")
    trained = train_tokenizer([text for talk in TALKS for text in talk] * 9, vocab_size=300)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained.content.decode()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    config = LlamaConfig(
        vocab_size=64 * -(-len(tokenizer) // 64),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    base, chats, corpus = folder_of(where / "base", config), where / "chats.jsonl", where / "chats"
    tokenizer.save_pretrained(base)
    roles = ["user", "assistant"] * 2
    chats.write_text(
        "".join(
            json.dumps(
                {
                    "messages": [
                        {"role": role, "content": text} for role, text in zip(roles, talk, strict=False)
                    ]
                }
            )
            + "\n"
            for talk in TALKS
        )
    )
    prepare = ["data", "prepare", str(chats), "--chat", "--tokenizer", str(base), "--out", str(corpus)]
    assert main(prepare) == 0
    return base, chats, corpus


def recipe_of(places, run, method):
    base, _, corpus = places
    return build_recipe(
        {
            "run": {"dir": str(run), "steps": 1, "start_from": str(base)},
            "tune": {"method": method, "rank": 4, "alpha": 6.0},
            "data": {
                "corpora": {"chats": {"path": str(corpus)}},
                "sequence_length": 128,
                "global_batch_size": ROWS,
                "packing": "whole",
            },
            "schedule": {"rule": "constant"},
            "compute": "float32",
        }
    )


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def ours(recipe, world):
    """Return the first values of what is learned, and the loss, gradients and learned tokens of a step."""
    state = open_state(recipe, world)
    learned = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
    for name, parameter in learned.items():
        if name.endswith("lora_b"):  # zeros, with which A has no gradient
            torch.nn.init.normal_(held(name, parameter)[1], std=0.1)
    first = {name: whole(p.detach()).clone() for name, p in learned.items()}
    gradients = {}
    state.optimizer.step = lambda *_, **__: gradients.update(
        {name: whole(p.grad).clone() for name, p in learned.items()}
    )
    batch = next(iter(state.loader))
    result = train_step(
        state, batch, world, micro_batch_size=1, clip_norm=1e9, asked=ControlFlags(stop=False)
    )
    return first, result.loss, gradients, int((batch["labels"] != -100).sum())


def theirs(recipe, places, first, folder):
    """Return the same of TRL, from the same first values: a step of SGD at the rate of 1."""
    from datasets import load_dataset  # dear: here only the worker that runs this file imports them
    from trl import SFTConfig, SFTTrainer

    base, chats, _ = places
    adapter = recipe.adapter
    options = SFTConfig(
        str(folder),
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=len(TALKS) // 2,
        assistant_only_loss=True,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=options,
        train_dataset=load_dataset(
            "json", data_files=str(chats), split="train", cache_dir=str(folder / "cache")
        ),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=None
        if adapter is None
        else LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=[*PROJECTIONS.values()]),
    )
    names, parameters = peft_names(recipe), dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, value in first.items():
            parameters[names[name]].copy_(value)
    loss = trainer.train().training_loss
    gradients = {name: value - parameters[names[name]].detach() for name, value in first.items()}
    learned = sum(label != -100 for labels in trainer.train_dataset["labels"] for label in labels)
    return loss, gradients, learned


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_step_on_packed_chats_is_that_of_trl(places, tmp_path, method):
    """1e-5: float32 sums in another order."""
    recipe = recipe_of(places, tmp_path / "run", method)
    ((first, loss, gradients, learned),) = on_ranks(lambda world: ours(recipe, world), ranks=1)
    expected, their_gradients, their_learned = theirs(recipe, places, first, tmp_path / "trl")
    assert learned == their_learned, "all chats are in the step's two rows"
    assert loss == pytest.approx(expected, abs=1e-5)
    assert gradients.keys() == their_gradients.keys() == peft_names(recipe).keys()
    for name, gradient in their_gradients.items():
        assert gradient.any(), name
        torch.testing.assert_close(gradients[name], gradient, rtol=0, atol=1e-5)
