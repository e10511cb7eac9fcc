"""The language to tune on: the same from a seed, none of those that are kept in what is asked."""

import json
from collections import Counter

import tokenizers

from penstock.testing.questions import TEMPLATE, Language, write
from penstock.text.chat_template import ChatTemplate, render
from penstock.text.tokenizer import train_tokenizer


def test_a_language_follows_from_its_seed():
    first, second, other = Language(seed=1), Language(seed=1), Language(seed=2)
    assert first.documents(5) == second.documents(5) != other.documents(5)
    assert first.questions(share=0.5) == second.questions(share=0.5)
    assert first.keys != other.keys


def test_what_is_kept_is_not_asked_and_no_text_answers_in_the_form():
    language = Language()
    asked, kept = language.questions(share=0.7)
    assert not {question.text for question in asked} & {question.text for question in kept}
    assert (
        {question.kind for question in asked}
        == {question.kind for question in kept}
        == {"fact", "sum", "tool"}
    )
    text = "<|endoftext|>".join(language.documents(50))
    assert "<tool_call>{" not in text
    assert "\nA: " not in text


def test_a_base_has_read_every_token_of_every_answer():
    """An adapter leaves the embedding as it is, and so cannot teach a token that the base never read."""
    language = Language()
    documents = language.documents(1000)
    made = tokenizers.Tokenizer.from_str(train_tokenizer(documents, vocab_size=500).content.decode())
    read = Counter(token for each in made.encode_batch(documents) for token in each.tokens)
    questions = [question for some in language.questions(share=0.7) for question in some]
    answers = made.encode_batch([f"\nQ: {question.text}\nA: {question.answer}" for question in questions])
    line_end = "\u010a"  # how the byte of a line end is written in a vocabulary
    assert min(read[token] for each in answers for token in each.tokens if token != line_end) > 20


def test_the_answer_is_what_the_template_writes(tmp_path):
    write(tmp_path, Language(places=3, largest=2), documents=4)
    template = ChatTemplate(source=(tmp_path / "chat_template.jinja").read_text())
    assert template.source == TEMPLATE
    for line in (tmp_path / "held-out.jsonl").read_text().splitlines():
        record = json.loads(line)
        for message in record["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = render(record["messages"], template, add_generation_prompt=False)
        assert text == f"\nQ: {record['question']}\nA: {record['answer']}<|endoftext|>"
