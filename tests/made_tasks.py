"""Questions made on the spot for evaluations, as files of lm-eval, and a tiny model of random weights."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tokenizers
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from penstock.evaluation.tasks import prepare
from penstock.text.tokenizer import EOS, Tokenizer, train_tokenizer

TEXT = (
    "water turbine penstock valve river dam lake pipe flows feeds turns the a of and under over slowly fast "
    "größer 日本 12 47 gate pump is was never always"
)
WORDS = TEXT.split()

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if not loop.last or add_generation_prompt %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_model(folder: Path, *, context: int = 256, begin: bool = True, seed: int = 0) -> Path:
    """Write a tiny Llama with tokenizer and chat template, as transformers opens it too.

    Args:
        begin: whether the tokenizer puts a begin token in front of texts.
    """
    texts = [" ".join(random.Random(i).choices(WORDS, k=40)) for i in range(40)]
    parsed = tokenizers.Tokenizer.from_str(train_tokenizer(texts, vocab_size=380).content.decode())
    if begin:
        parsed.add_special_tokens([tokenizers.AddedToken("<s>", normalized=False)])
        parsed.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", parsed.token_to_id("<s>"))]
        )
    tokenizer = Tokenizer(parsed.to_str().encode())
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=tokenizer.added.get("<s>"),
        eos_token_id=tokenizer.eos_id,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save(folder / "tokenizer.json")
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "model_max_length": context}
    if begin:
        named["bos_token"] = "<s>"
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def sentence(chance: random.Random, least: int, most: int) -> str:
    """Return words in no order."""
    return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))


CHOICE = {
    "dataset_path": "json",
    "test_split": "train",
    "fewshot_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "Question: {{question}}\nAnswer:",
    "doc_to_target": "label",
    "doc_to_choice": "choices",
    "metric_list": [
        {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
    ],
    "metadata": {"version": 1.0},
}
CLOZE = {
    **{name: CHOICE[name] for name in ("dataset_path", "test_split", "metadata")},
    "output_type": "loglikelihood",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[0]}}",
    "metric_list": [
        {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False},
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    ],
}
ROLLING = {
    **{name: CHOICE[name] for name in ("dataset_path", "test_split", "metadata")},
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [
        {"metric": "word_perplexity", "aggregation": "weighted_perplexity", "higher_is_better": False}
    ],
}
WRITING = {
    **{name: CHOICE[name] for name in ("dataset_path", "test_split", "metadata")},
    "output_type": "generate_until",
    "doc_to_text": "Continue: {{question}}",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n", " dam"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
KINDS = {
    "made_choice": CHOICE,
    "made_cloze": CLOZE,
    "made_rolling": ROLLING,
    "made_writing": WRITING,
    "made_shots": {**CHOICE, "num_fewshot": 3},
}


@contextmanager
def own_cache(folder: Path) -> Iterator[None]:
    """Context manager: data sets of tests leave nothing in the user's cache."""
    prepare(download=False)
    import datasets

    before, datasets.config.HF_DATASETS_CACHE = datasets.config.HF_DATASETS_CACHE, folder
    yield
    datasets.config.HF_DATASETS_CACHE = before


def save_tasks(folder: Path, *, questions: int = 60, words: int = 120) -> list[Path]:
    """Write a task of each kind with this many questions each, and their data beside them.

    Args:
        words: of the longest texts of the rolling kind.
    """
    chance = random.Random(7)
    docs = [
        {
            "question": sentence(chance, 2, 20),
            "choices": [sentence(chance, 1, 5) for _ in range(3)] + [chance.choice(WORDS)],
            "label": chance.randrange(4),
            "text": sentence(chance, 1, words),
        }
        for _ in range(questions)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    files = []
    for name, kind in KINDS.items():
        files.append(folder / f"{name}.json")
        task = {"task": name, **kind, "dataset_kwargs": {"data_files": "questions.jsonl"}}
        files[-1].write_text(json.dumps(task))
    return files
