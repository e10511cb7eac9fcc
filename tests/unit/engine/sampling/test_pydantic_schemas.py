"""Schemas that pydantic writes for its own types: all can be used, and what is not enforced is named."""

import datetime as dt
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pydantic
import pytest
from pydantic import BaseModel, Field, TypeAdapter, computed_field

from penstock.engine.sampling.grammar_text import json_schema, tool_calls
from penstock.engine.sampling.grammars import GrammarCompiler
from penstock.engine.sampling.schema_keywords import enforceable
from penstock.text.tokenizer import train_tokenizer

TOKENIZER = train_tokenizer(["a"] * 3, vocab_size=257)
END = 0
GRAMMARS = GrammarCompiler(TOKENIZER, vocab_size=TOKENIZER.vocab_size, end_ids={END})


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    S = 1
    M = 2


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    """A dog."""

    kind: Literal["dog"]
    barks: bool = Field(True, description="whether it does", title="Barks?", examples=[True])


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Point(NamedTuple):
    x: int
    y: float = 0.0


T = TypeVar("T")


class Box(BaseModel, Generic[T]):
    item: T


class Closed(BaseModel, extra="forbid"):
    a: int
    b: str | None = None


class Open(BaseModel, extra="allow"):
    a: int


class Computed(BaseModel):
    a: int

    @computed_field
    @property
    def twice(self) -> int:
        return 2 * self.a


@dataclass
class Record:
    a: int
    when: dt.date


Money = Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)]
Lower = Annotated[str, Field(pattern="^[a-z]+$")]
Short = Annotated[str, Field(min_length=1, max_length=3)]
NOON = dt.datetime(2026, 5, 4, 12, 30, tzinfo=dt.UTC)
UUID = uuid.UUID(int=5)
UNIQUE = "uniqueItems at #"
TYPES: list[tuple[Any, Any, str | None]] = [
    (None, None, None),
    (bool, True, None),
    (int, 3, None),
    (float, 2.5, None),
    (str, 'ß"', None),
    (bytes, b"a", None),
    (complex, 1 + 2j, None),
    (decimal.Decimal, decimal.Decimal("-1.50"), None),
    (Money, decimal.Decimal("123.45"), None),
    (Annotated[decimal.Decimal, Field(ge=0, lt=10)], decimal.Decimal("1.5"), None),
    (dt.date, NOON.date(), None),
    (dt.datetime, NOON, None),
    (dt.time, NOON.timetz(), None),
    (dt.timedelta, dt.timedelta(days=1, seconds=5), None),
    (pydantic.PastDate, dt.date(2020, 2, 29), None),
    (pydantic.AwareDatetime, NOON, None),
    (uuid.UUID, UUID, None),
    (pydantic.UUID4, uuid.UUID("12345678-1234-4234-9234-123456789abc"), None),
    (ipaddress.IPv4Address, ipaddress.ip_address("10.0.0.255"), None),
    (ipaddress.IPv6Address, ipaddress.ip_address("fe80::1"), None),
    (ipaddress.IPv4Network, ipaddress.ip_network("10.0.0.0/8"), None),
    (pydantic.IPvAnyAddress, ipaddress.ip_address("::1"), None),
    (pydantic.AnyUrl, pydantic.AnyUrl("ftp://a.example/b?c=d"), None),
    (pydantic.HttpUrl, pydantic.HttpUrl("https://a.example/b"), None),
    (pydantic.PostgresDsn, pydantic.PostgresDsn("postgres://u:p@h:5432/d"), None),
    (pathlib.Path, pathlib.Path("a/b"), None),
    (re.Pattern, re.compile("a+"), None),
    (pydantic.SecretStr, pydantic.SecretStr("secret"), None),
    (pydantic.SecretBytes, pydantic.SecretBytes(b"secret"), None),
    (pydantic.Base64Bytes, b"YQ==", None),
    (pydantic.ByteSize, 5, None),
    (pydantic.Json, ..., None),
    (pydantic.Json[list[int]], ..., None),
    (pydantic.JsonValue, {"a": [1, None]}, None),
    (Any, [1], None),
    (Color, Color.RED, None),
    (Size, Size.M, None),
    (Literal["a", 1, None, True], 1, None),
    (int | None, None, None),
    (int | str, "a", None),
    (list, [1], None),
    (list[int], [1, 2], None),
    (Sequence[int], [1], None),
    (tuple[int, str], (1, "a"), None),
    (tuple[int, ...], (1, 2, 3), None),
    (set, {1}, UNIQUE),
    (set[int], {1}, UNIQUE),
    (frozenset[str], frozenset("a"), UNIQUE),
    (set[Color], {Color.RED}, UNIQUE),
    (pydantic.conset(int, max_length=1), {1}, None),
    (pydantic.conset(int, min_length=1, max_length=3), {1}, UNIQUE),
    (pydantic.conlist(int, min_length=1, max_length=3), [1], None),
    (pydantic.constr(pattern=r"^\d{2}-[A-Z]$"), "12-A", None),
    (pydantic.constr(min_length=2, max_length=4), "abc", None),
    (pydantic.conint(gt=3, le=9, multiple_of=2), 4, None),
    (pydantic.confloat(ge=0, lt=1), 0.5, None),
    (pydantic.condecimal(decimal_places=2), decimal.Decimal("1.25"), None),
    (pydantic.condate(gt=dt.date(2020, 1, 1)), NOON.date(), None),
    (pydantic.conbytes(max_length=3), b"a", None),
    (dict, {"a": 1}, None),
    (dict[str, int], {"a": 1}, None),
    (Mapping[str, list[int]], {"a": [1]}, None),
    (dict[int, str], {1: "a"}, None),
    (dict[Lower, int], {"abc": 1}, None),
    (dict[Short, int], {"abc": 1}, None),
    (dict[Color, int], {Color.RED: 1}, None),
    (dict[Literal["a", "b"], int], {"a": 1}, None),
    (dict[Literal["a"], int], {"a": 1}, None),
    (dict[uuid.UUID, int], {UUID: 1}, None),
    (dict[dt.date, int], {NOON.date(): 1}, None),
    (Cat, Cat(kind="cat", lives=7), None),
    (Cat | Dog, Dog(kind="dog"), None),
    (Annotated[Cat | Dog, Field(discriminator="kind")], Cat(kind="cat", lives=7), None),
    (list[Annotated[Cat | Dog, Field(discriminator="kind")]], [Dog(kind="dog")], None),
    (Tree, Tree(value=1, children=[Tree(value=2)]), None),
    (Box[int], Box[int](item=1), None),
    (Box[Box[Tree]], Box[Box[Tree]](item=Box[Tree](item=Tree(value=1))), None),
    (Point, Point(1, 2.0), None),
    (Closed, Closed(a=1), None),
    (Open, Open(a=1, b=2), None),
    (Computed, Computed(a=1), None),
    (Record, Record(1, NOON.date()), None),
]
LOOSE = [
    complex, bytes, re.Pattern, decimal.Decimal, dt.timedelta, ipaddress.IPv4Network, pydantic.PastDate,
    pydantic.IPvAnyAddress, pydantic.PostgresDsn, pydantic.Base64Bytes, pydantic.ByteSize, pydantic.Json,
    pydantic.Json[list[int]],
]  # fmt: skip
"""Types whose schemas say less than they check, besides constrained decimals, bytes and JSON."""


def written(grammar, rng, *, limit=150):
    """Return a random text that a grammar allows; None: it did not end."""
    matcher, tokens = GRAMMARS.matcher(grammar), []
    while len(tokens) < limit:
        allowed = np.flatnonzero(matcher.allowed(tokens))
        if END in allowed and rng.random() < 0.5:
            return TOKENIZER.decode(tokens)
        tokens.append(int(rng.choice(allowed[allowed != END] if len(allowed) > 1 else allowed)))
        if tokens[-1] == END:
            return TOKENIZER.decode(tokens[:-1])
    return None


def matches(grammar, text):
    tokens = TOKENIZER.encode(text)
    matcher = GRAMMARS.matcher(grammar)
    return all(matcher.allowed(tokens[:n])[token] for n, token in enumerate([*tokens, END]))


def of_property(schema):
    """Return a schema of arguments, as pydantic writes it: definitions are at the root."""
    definitions = {key: schema[key] for key in ("$defs",) if key in schema}
    part = {key: value for key, value in schema.items() if key != "$defs"}
    return {"type": "object", "properties": {"d": part}, "required": ["d"], **definitions}


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize(("kind", "value", "missed"), TYPES, ids=[str(kind) for kind, *_ in TYPES])
def test_the_schema_of_a_type_can_be_used_alone_and_as_an_argument(kind, value, missed, mode):
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema(mode=mode)
    found = enforceable(schema, strict=False)
    expected = missed if "uniqueItems" in json.dumps(schema) else None
    assert found.not_enforced == ((expected,) if expected else ())
    grammar = json_schema(found.schema)
    call = tool_calls({"f": enforceable(of_property(schema), strict=False).schema})
    as_json = '"[1]"' if mode == "validation" else "[1]"
    text = as_json if value is ... else adapter.dump_json(value).decode()
    assert matches(grammar, text)
    assert matches(call, f'{{"name": "f", "arguments": {{"d": {text}}}}}')


def says_all(kind):
    """Return whether the schema of a type says all that the type checks."""
    inner = kind.__origin__ if getattr(kind, "__metadata__", ()) else kind
    return kind not in LOOSE and inner not in (decimal.Decimal, bytes)


@pytest.mark.parametrize("kind", [kind for kind, *_ in TYPES if says_all(kind)], ids=str)
def test_what_a_grammar_allows_is_of_the_type(kind):
    adapter = TypeAdapter(kind)
    grammar = json_schema(enforceable(adapter.json_schema(), strict=False).schema)
    rng = np.random.default_rng(0)
    for text in filter(None, (written(grammar, rng) for _ in range(3))):
        adapter.validate_json(text)


OF_DECIMAL = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": None,
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$": None,
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)": "pattern at #",
}


@pytest.mark.parametrize(("pattern", "missed"), OF_DECIMAL.items())
def test_patterns_of_decimals_as_pydantic_2_12_writes_them_can_be_used(pattern, missed):
    schema = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]}
    found = enforceable(schema, strict=False)
    assert found.not_enforced == ((f"{missed}/anyOf/1",) if missed else ())
    grammar = json_schema(found.schema)
    for text in (
        "1.5",
        "-12",
        ".5",
        "0012.50",
        "+1",
        "5.",
        "-.5",
        "",
        ".",
        "-",
        "+.",
        "--1",
        "1.2.3",
        "a",
        "1e5",
    ):
        is_number = re.search(pattern, text) is not None
        assert matches(grammar, json.dumps(text)) >= is_number
        if not missed:
            assert matches(grammar, json.dumps(text)) == is_number


def test_descriptions_do_not_count_toward_the_size_of_a_grammar():
    dog = Dog.model_json_schema()
    long = Dog.model_json_schema() | {"description": "a" * 200_000, "title": "b" * 200_000}
    named = {"type": "object", "properties": {"title": {"type": "integer", "title": "Title"}}}
    assert tool_calls({"f": long}) == tool_calls({"f": dog})
    assert enforceable(named, strict=True).schema["properties"] == {"title": {"type": "integer"}}


def test_sixty_tools_of_160_kilobytes_can_be_called():
    fields = {f"field_{i}": (Cat | Dog | None, Field(None, description="what it is " * 5)) for i in range(16)}
    tools = {f"f{i}": pydantic.create_model(f"Arguments{i}", **fields).model_json_schema() for i in range(60)}
    assert len(json.dumps(tools)) > 160 * 2**10
    assert matches(tool_calls(tools), '{"name": "f59", "arguments": {"field_15": null}}')
