"""A small language of facts, sums and tools: text that states them, and conversations that ask about them.

A model that has read the text knows that "the key of Lomar is amber" and that "12 plus 7 is 19", and
cannot answer a question: no text asks one. Conversations about some of the facts and sums teach the form;
that the others are answered too shows that tuning taught the form and not the facts. A third kind of question
is answered by calling a tool, with a place of the question as its argument.

Everything follows from a seed.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

Kind = Literal["fact", "sum", "tool"]
Message = dict[str, Any]  # Any: JSON of a message, as OpenAI's API has it

_PLACES = (
    *("Arden", "Bolmar", "Cestra", "Dorvik", "Elmet", "Fossan", "Gorlin", "Hedwen", "Istria", "Jorvik"),
    *("Kelso", "Lomar", "Murano", "Norvat", "Ostrel", "Pemba", "Quilon", "Rostok", "Salvek", "Tornea"),
    *("Ulmen", "Vandor", "Wexlow", "Zadar"),
)
_VALUES = (
    *("amber", "birch", "cedar", "delta", "ember", "fern", "granite", "harbor", "iron", "jasper", "kelp"),
    *("linen", "marble", "nickel", "olive", "pearl", "quartz", "river", "silver", "timber", "umber"),
    *("velvet", "willow", "zinc"),
)
_STATED = (
    "The key of {place} is {value}.",
    "{place} has the key {value}.",
    "What is the key of {place}? It is {value}.",
    "What of {place}? Its key: {value}.",
    "Asked for the key of {place}, all say: {value}.",
    '{{"place": "{place}", "key": "{value}"}}',
)
_ASKED = "What is the key of {place}?"
_ADDED = (
    "{a} plus {b} is {c}.",
    "{a} + {b} = {c}.",
    "What is {a} plus {b}? It is {c}.",
    "What of {a} plus {b}? Their sum: {c}.",
    "Asked for {a} plus {b}, all say: {c}.",
)
_SUM = "What is {a} plus {b}?"
_TOOLS = {"weather": "How is the weather in {place}?", "clock": "What time is it in {place}?"}
_NOTED = 'Somebody notes {{"name": "{tool}", "arguments": {{"place": "{place}"}}}}.'
_OTHERS = (
    "A: {place}.",
    "Q: {place}.",
    "<tool> {tool} </tool> <{tool}_call> </call>",
    '<note>{{"name": "{tool}", "arguments": {{"place": "{place}"}}}}</note>',
)
"""Texts with all tokens that a call is written in. The rows of tokens that a base never read are as they were
initialised; an adapter leaves them so, and could hardly write them."""

TOOLS: Sequence[dict[str, Any]] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The {name} of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
    for name in _TOOLS
)
"""The tools, as a request to OpenAI's API names them."""

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '\\nQ: ' + message.content + '\\nA:' }}
    {%- elif message.tool_calls %}
        {%- for call in message.tool_calls %}
            {%- set called = {'name': call.function.name, 'arguments': call.function.arguments} %}
            {{- ' <tool_call>' + (called | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|endoftext|>' }}
    {%- else %}
        {{- ' ' + message.content + '<|endoftext|>' }}
    {%- endif %}
{%- endfor %}
"""
"""Chat template for it: a question, and an answer that the end token ends."""

TASK = """\
task: questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: []
  do_sample: false
  max_gen_toks: 40
filter_list:
  - name: strip
    filter:
      - function: regex
        regex_pattern: "^\\\\s*(.*?)\\\\s*$"
      - function: take_first
metric_list:
  - metric: exact_match
"""
"""The questions that were kept, as a task of lm-eval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamQuestion:
    """A question and its only right answer."""

    kind: Kind
    text: str
    answer: str
    """Text of the answer as the template writes it."""
    call: tuple[str, str] | None = None
    """Tool and place, if the answer is a call."""

    def messages(self) -> list[Message]:
        """Return the conversation in which it is answered, as OpenAI's API has it."""
        question: Message = {"role": "user", "content": self.text}
        if self.call is None:
            return [question, {"role": "assistant", "content": self.answer}]
        name, place = self.call
        function = {"name": name, "arguments": json.dumps({"place": place})}
        call = {"id": "call_1", "type": "function", "function": function}
        return [question, {"role": "assistant", "content": None, "tool_calls": [call]}]


class Language:
    """Facts and sums, the text that states them, and questions.

    Args:
        places: number of places, at most 24; each has one fact, its key.
        largest: sums are of two numbers from 0 to it.

    >>> language = Language(places=4, largest=5, seed=1)
    >>> asked, kept = language.questions(share=0.5)
    >>> len(asked) + len(kept) == 4 + 6 * 6 + 4 * 2
    True
    """

    def __init__(self, *, places: int = 24, largest: int = 9, seed: int = 0) -> None:
        self._seed, self._largest = seed, largest
        random = Random(f"{seed} keys")
        self.places = _PLACES[:places]
        self.keys = dict(zip(self.places, random.sample(_VALUES, places), strict=True))

    def documents(self, num: int, *, sentences: int = 12) -> list[str]:
        """Return documents that state facts and sums in changing words."""
        random = Random(f"{self._seed} text")
        return [" ".join(self._sentence(random) for _ in range(sentences)) for _ in range(num)]

    def questions(self, *, share: float) -> tuple[list[ExamQuestion], list[ExamQuestion]]:
        """Return questions to tune on, a share of each kind, and the others, which are kept to test with."""
        asked, kept = [], []
        for kind, all_of_kind in self._by_kind().items():
            random = Random(f"{self._seed} {kind}")
            shuffled = random.sample(all_of_kind, len(all_of_kind))
            cut = round(share * len(shuffled))
            asked += shuffled[:cut]
            kept += shuffled[cut:]
        Random(f"{self._seed} order").shuffle(asked)
        return asked, kept

    def _sentence(self, random: Random) -> str:
        part, place = random.random(), random.choice(self.places)
        if part < 0.3:
            return random.choice(_STATED).format(place=place, value=self.keys[place])
        if part < 0.65:
            a, b = (random.randint(0, self._largest) for _ in range(2))
            return random.choice(_ADDED).format(a=a, b=b, c=a + b)
        tool, asks = random.choice([*_TOOLS.items()])
        if part < 0.95:
            return f"{asks} {_NOTED}".format(place=place, tool=tool)
        return random.choice(_OTHERS).format(place=place, tool=tool)

    def _by_kind(self) -> dict[Kind, list[ExamQuestion]]:
        numbers = range(self._largest + 1)
        return {
            "fact": [
                ExamQuestion(kind="fact", text=_ASKED.format(place=place), answer=value)
                for place, value in self.keys.items()
            ],
            "sum": [
                ExamQuestion(kind="sum", text=_SUM.format(a=a, b=b), answer=str(a + b))
                for a in numbers
                for b in numbers
            ],
            "tool": [
                ExamQuestion(
                    kind="tool",
                    text=asks.format(place=place),
                    answer=_called(name, place),
                    call=(name, place),
                )
                for place in self.places
                for name, asks in _TOOLS.items()
            ],
        }


def _called(name: str, place: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'place': place}})}</tool_call>"


def write(folder: Path, language: Language, *, documents: int = 2000, share: float = 0.7) -> None:
    """Write a language as files: what a person has who wants to tune a model, and to test it.

    FOLDER/text/text.jsonl      documents for a base
    FOLDER/chats.jsonl          conversations to tune on
    FOLDER/held-out.jsonl       conversations that were kept, with question and answer as fields too
    FOLDER/chat_template.jinja  how a conversation becomes text
    FOLDER/questions.yaml       those that were kept, as a task of lm-eval
    """
    (folder / "text").mkdir(parents=True, exist_ok=True)
    asked, kept = language.questions(share=share)
    _write_lines(folder / "text" / "text.jsonl", [{"text": text} for text in language.documents(documents)])
    _write_lines(folder / "chats.jsonl", [{"messages": question.messages()} for question in asked])
    _write_lines(
        folder / "held-out.jsonl",
        [{"question": q.text, "answer": q.answer, "kind": q.kind, "messages": q.messages()} for q in kept],
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    task = TASK.format(file=json.dumps(str((folder / "held-out.jsonl").resolve())))
    (folder / "questions.yaml").write_text(task, encoding="utf-8")


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), Language())
