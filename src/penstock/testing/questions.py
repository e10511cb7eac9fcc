"""A small language of facts, sums and tools: text that states them, and conversations that ask about them.

A model that has read the text knows that "the key of Lomar is amber" and that "12 plus 7 is 19", and
cannot answer a question: no text asks one. Conversations about some of the facts and sums teach the form;
that the others are answered too shows that tuning taught the form and not the facts. A third kind of question
is answered by calling a tool, with a place of the question as its argument.

Everything follows from a seed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
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
    '{{"place": "{place}", "key": "{value}"}}',
)
_ASKED = "What is the key of {place}?"
_ADDED = ("{a} plus {b} is {c}.", "{a} + {b} = {c}.", "What is {a} plus {b}? It is {c}.")
_SUM = "What is {a} plus {b}?"
_TOOLS = {"weather": "How is the weather in {place}?", "clock": "What time is it in {place}?"}
_NOTED = 'Somebody notes {{"name": "{tool}", "arguments": {{"place": "{place}"}}}}.'
_OTHERS = ("A: {place}.", "Q: {place}.", "<tool> {tool} </tool> <{tool}_call> </call>")

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

TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{ '\\nQ: ' + message.content + '\\nA: ' }}"
    "{%- elif message.tool_calls %}"
    "{%- for call in message.tool_calls %}"
    "{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}"
    "{{- '</tool_call>' }}"
    "{%- endfor %}{{ eos_token }}"
    "{%- else %}{{ message.content + eos_token }}{%- endif %}"
    "{%- endfor %}"
)
"""A chat template for it: a question, and an answer that the end token ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question and its only right answer."""

    kind: Kind
    text: str
    answer: str
    """Text of the answer; of a tool call, its JSON."""
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

    def questions(self, *, share: float) -> tuple[list[Question], list[Question]]:
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
        if part < 0.4:
            return random.choice(_STATED).format(place=place, value=self.keys[place])
        if part < 0.75:
            a, b = (random.randint(0, self._largest) for _ in range(2))
            return random.choice(_ADDED).format(a=a, b=b, c=a + b)
        tool, asks = random.choice([*_TOOLS.items()])
        if part < 0.95:
            return f"{asks} {_NOTED}".format(place=place, tool=tool)
        return random.choice(_OTHERS).format(place=place, tool=tool)

    def _by_kind(self) -> dict[Kind, list[Question]]:
        numbers = range(self._largest + 1)
        return {
            "fact": [
                Question(kind="fact", text=_ASKED.format(place=place), answer=value)
                for place, value in self.keys.items()
            ],
            "sum": [
                Question(kind="sum", text=_SUM.format(a=a, b=b), answer=str(a + b))
                for a in numbers
                for b in numbers
            ],
            "tool": [
                Question(
                    kind="tool",
                    text=asks.format(place=place),
                    answer=json.dumps({"name": name, "arguments": {"place": place}}),
                    call=(name, place),
                )
                for place in self.places
                for name, asks in _TOOLS.items()
            ],
        }
