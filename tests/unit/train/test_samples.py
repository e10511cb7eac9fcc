"""Prompts of [samples] as the model reads them."""

import pytest

from penstock.engine.text_processor import TextProcessor
from penstock.text.chat_template import ChatTemplate
from penstock.text.tokenizer import train_tokenizer
from penstock.train.recipe.samples_config import SampleChat, SamplesConfig
from penstock.train.samples import given_prompts

TOOL = {"type": "function", "function": {"name": "flow", "parameters": {"type": "object"}}}
ASKED = {"role": "user", "content": "How much water?"}
TEMPLATE = "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}{{ messages[0].content }}\n"


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("How much", "How much"),
        ((ASKED,), "How much water?"),
        (SampleChat(messages=(ASKED,)), "How much water?"),
        (SampleChat(messages=(ASKED,), tools=(TOOL,)), "tool flow\nHow much water?"),
    ],
)
def test_a_prompt_is_read_with_its_tools_and_shown_without(prompt, read):
    tokenizer = train_tokenizer(["tool flow How much water?\n"] * 9, vocab_size=300)
    processor = TextProcessor(tokenizer=tokenizer, template=ChatTemplate(source=TEMPLATE))
    (found,) = given_prompts(SamplesConfig(every=1, prompts=(prompt,)), processor)
    assert tokenizer.decode(list(found.ids)) == read
    assert found.text == (prompt if isinstance(prompt, str) else "How much water?")
