"""A tiny Llama and conversations of many lengths, as files that every trainer reads."""

import json
from random import Random

import transformers

from penstock.cli.main import main as penstock
from penstock.testing.questions import Language
from penstock.text.tokenizer import train_tokenizer

TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message.content + '<|im_end|>' }}{% endif %}{{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""


def make(folder, arguments):
    """Write base/ (a Hugging Face folder), chats.jsonl, and chats/ (Penstock's corpus of them)."""
    random = Random(0)
    texts = Language().documents(400)
    (folder / "chats.jsonl").write_text(
        "".join(
            f"{json.dumps({'messages': conversation(random, texts)})}\n"
            for _ in range(arguments.conversations)
        )
    )
    tokenizer = train_tokenizer(texts, vocab_size=arguments.vocabulary)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=transformers.tokenization_utils_fast.TokenizerFast.from_str(
            tokenizer.content.decode()
        ),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE
    base = folder / "base"
    fast.save_pretrained(base)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64 * -(-len(fast) // 64),
            hidden_size=arguments.hidden,
            intermediate_size=3 * arguments.hidden,
            num_hidden_layers=arguments.layers,
            num_attention_heads=max(arguments.hidden // 32, 1),
            max_position_embeddings=arguments.length,
        )
    ).save_pretrained(base)
    words = ["--chat", "--tokenizer", base, "--max-tokens", arguments.length, "--too-long", "drop"]
    prepared = ["data", "prepare", folder / "chats.jsonl", *words, "--out", folder / "chats"]
    assert penstock(list(map(str, prepared))) == 0


def conversation(random, texts):
    """Return a conversation of one to four questions; lengths are spread as those of chats are."""
    messages = []
    for _ in range(random.choice((1, 1, 2, 4))):
        size = round(random.lognormvariate(3.3, 0.8))
        words = " ".join(random.sample(texts, 4)).split()
        messages.append({"role": "user", "content": " ".join(words[:12])})
        messages.append({"role": "assistant", "content": " ".join(words[: max(size, 4)])})
    return messages
