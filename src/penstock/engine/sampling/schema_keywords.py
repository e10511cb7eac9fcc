"""JSON schemas in the keywords that the grammar library enforces; pure.

`enforceable` drops what the standard calls an annotation, rewrites keywords that the library lacks where
others say the same, and names the rest. Subschemas stay where they are, so that references find them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, cast
from urllib.parse import unquote

from penstock.core.errors import UsageError
from penstock.engine.sampling.conjunctions import MAX_PATTERNS, combines_too_many
from penstock.engine.sampling.patterns import without_look_around

Schema = Any
"""A JSON schema: an object, True or False."""
Rewrite = Callable[[dict[str, Any], Schema], bool]
Resolve = Callable[[Schema], Schema]
"""Returns a schema with what its references name."""

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
)
"""Values of `format` that are enforced; others are annotations, as the standard has it."""

_ANNOTATIONS = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "contentEncoding",
        "contentMediaType",
        "contentSchema",
    )
)
"""Keywords that say nothing about which values match; they do not count toward the size of a grammar."""

_FORMATS_OF_NAMES = {
    "date": r"^\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])$",
    "uuid": r"^[\da-fA-F]{8}(?:-[\da-fA-F]{4}){3}-[\da-fA-F]{12}$",
}
"""Patterns of formats that names of properties have: the library has a format for values only."""

_UUID = re.compile("uuid([1-8])")

_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("additionalProperties", "items")
_DIALECT = re.compile(r"https?://json-schema\.org/(?:(draft-0[3-7])|(draft/20\d\d-\d\d))/schema#?")
_IDENTIFIER = re.compile(r"[\w$-]+")
_MAX_REFERENCES = 32
"""References that are followed one after the other."""
_EVALUATE = (
    "anyOf",
    "oneOf",
    "allOf",
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "if",
    "dependentSchemas",
    "contains",
)
"""Keywords that may evaluate parts of a value, which `unevaluated...` then allows."""
_MAX_TARGETS = 64
"""References into keywords that are rewritten; the library refuses the others."""
_MAX_ONE_OF = 256
"""Alternatives of which each is compared with each."""
_MAX_DEPENDENT = 3
"""Keys of `dependentRequired` that are enforced: each doubles the alternatives of its object."""


@dataclass(frozen=True, slots=True)
class Enforceable:
    """A schema that the library takes, and what of the original it does not say."""

    schema: dict[str, Any]
    not_enforced: tuple[str, ...] = ()
    """Keywords with the paths of their schemas: "contains at #/properties/a"."""


def enforceable(schema: Mapping[str, Any], *, strict: bool, at: str = "#") -> Enforceable:
    """Return a schema that can be enforced.

    Args:
        strict: refuse keywords that cannot be enforced.
        at: key of a request that has this schema, for messages.

    Raises:
        UsageError: the schema is nested too deeply, a text has too many patterns, or `strict` and a keyword
            cannot be enforced.

    >>> enforceable({"type": "array", "contains": {"const": 1}, "uniqueItems": False}, strict=False)
    Enforceable(schema={'type': 'array'}, not_enforced=('contains at #',))
    >>> enforceable({"items": {"not": {}}}, strict=False, at="guided_json").not_enforced
    ('not at guided_json.items',)
    """
    missed: list[tuple[str, str]] = []
    try:
        found = _walked(_with_targets(dict(schema)), "#", missed, partial(_resolved, root=schema))
    except RecursionError:
        raise UsageError("A schema is nested too deeply", fix="Flatten it.") from None
    if combines_too_many(found, partial(_at, found)):
        raise UsageError(
            f"{at}: a value must match too many schemas at once",
            fix=f"Use at most {MAX_PATTERNS} patterns for one text.",
        )
    not_enforced = tuple(f"{keyword} at {place(at, pointer)}" for keyword, pointer in missed)
    if strict and missed:
        raise UsageError(
            "Keywords of the schema cannot be enforced",
            got=", ".join(not_enforced),
            fix="Leave it out, or ask without strict.",
        )
    return Enforceable(cast("dict[str, Any]", found), not_enforced)


def place(at: str, pointer: str) -> str:
    """Return where a part of a schema is: its pointer, or in a key of a request the path to it.

    >>> place("#", "#/items"), place("guided_json", "#/properties/a~1b/anyOf/0")
    ('#/items', 'guided_json.properties["a/b"].anyOf[0]')
    """
    return pointer if at == "#" else at + "".join(map(_step, pointer.split("/")[1:]))


def _step(part: str) -> str:
    name = part.replace("~1", "/").replace("~0", "~")
    return f"[{name}]" if name.isdecimal() else f".{name}" if _IDENTIFIER.fullmatch(name) else f'["{name}"]'


def _with_targets(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose references into keywords that are rewritten name copies in `$defs`.

    >>> _with_targets({"not": {"const": 1}, "items": {"$ref": "#/not"}})
    {'not': {'const': 1}, 'items': {'$ref': '#/$defs/of-0'}, '$defs': {'of-0': {'const': 1}}}
    """
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, dict):
        return schema
    names: dict[str, str] = {}
    pointers = {one for one in _references(schema) if not _REWRITTEN.isdisjoint(one.split("/"))}
    for pointer in sorted(pointers)[:_MAX_TARGETS]:
        with suppress(LookupError, ValueError, TypeError):
            target = _at(schema, pointer)
            names[pointer] = next(name for n in count() if (name := f"of-{n}") not in definitions)
            definitions = {**definitions, names[pointer]: target}
    return cast("dict[str, Any]", _renamed({**schema, "$defs": definitions}, names)) if names else schema


def _references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            yield reference
        for one in value.values():
            yield from _references(one)
    elif isinstance(value, list):
        for one in value:
            yield from _references(one)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:  # Any: JSON
    """Return a schema whose references have other names: pointer -> definition."""
    if isinstance(value, list):
        return [_renamed(one, names) for one in value]
    if not isinstance(value, dict):
        return value
    found = {
        name: one if name in ("const", "enum", "default", "examples") else _renamed(one, names)
        for name, one in value.items()
    }
    if isinstance(pointer := value.get("$ref"), str) and pointer in names:
        found["$ref"] = f"#/$defs/{names[pointer]}"
    return found


def _at(schema: Schema, pointer: str) -> Schema:
    """Return what a pointer such as #/properties/a names.

    Raises:
        LookupError, ValueError, TypeError: nothing.
    """
    for name in pointer.split("/")[1:]:
        part = unquote(name).replace("~1", "/").replace("~0", "~")
        schema = schema[int(part)] if isinstance(schema, list) else schema[part]
    return schema


def _resolved(schema: Schema, *, root: Mapping[str, Any]) -> Schema:
    """Return a schema with the keywords of what it refers to, which its values match too.

    What another value of a keyword replaces stays in `allOf`.
    """
    replaced: list[Schema] = []
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict):
            return schema
        rest, parts = dict(schema), []
        if isinstance(pointer := rest.get("$ref"), str) and pointer.startswith("#/"):
            with suppress(LookupError, ValueError, TypeError):
                parts.append(_at(root, pointer))
                del rest["$ref"]
        if isinstance(all_of := rest.get("allOf"), list) and len(all_of) == 1:
            del rest["allOf"]
            parts += all_of
        if not parts:
            break
        schema = rest
        for part in parts:
            if part is False:
                return False
            of_part = part if isinstance(part, dict) else {}
            if any(schema[key] != of_part[key] for key in (schema.keys() & of_part) - _ANNOTATIONS):
                replaced.append(part)
            schema = {**of_part, **schema}
    return {**schema, "allOf": [*schema.get("allOf", []), *replaced]} if replaced else schema


def _walked(schema: Schema, path: str, missed: list[tuple[str, str]], resolve: Resolve) -> Schema:
    if not isinstance(schema, dict):
        return schema
    found = _without_annotations(schema, is_root=path == "#")
    if isinstance(alternatives := found.get("oneOf"), list) and not _excludes(alternatives, resolve):
        missed.append(("oneOf", path))
        _any_of(found, found.pop("oneOf"))
    if "propertyNames" in found:
        names = resolve(found["propertyNames"])
        found["propertyNames"] = (
            _without_annotations(names, is_root=False) if isinstance(names, dict) else names
        )
    for keyword, rewrite in _REWRITES.items():
        if keyword in found and not rewrite(found, found.pop(keyword)):
            missed.append((keyword, path))
    for keyword, value in found.items():
        below = f"{path}/{_escaped(keyword)}"
        if keyword in _OF_SCHEMAS and isinstance(value, dict):
            found[keyword] = {
                name: _walked(one, f"{below}/{_escaped(name)}", missed, resolve)
                for name, one in value.items()
            }
        elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            parts = value if isinstance(value, list) else []
            walked = [_walked(one, f"{below}/{index}", missed, resolve) for index, one in enumerate(parts)]
            found[keyword] = walked if isinstance(value, list) else value
        elif keyword in _ONE:
            found[keyword] = _walked(value, below, missed, resolve)
    return found


def moved(schema: Schema, root: str) -> Schema:
    """Return a schema to embed in another one at `root`: there its references to `#` lead to itself.

    Values such as those of `const` stay as they are. A schema that names itself by `$id` is found by its
    references wherever it stands.

    >>> moved({"$ref": "#/$defs/a", "$defs": {"a": {"const": {"$ref": "#"}}}}, "#/items")
    {'$ref': '#/items/$defs/a', '$defs': {'a': {'const': {'$ref': '#'}}}}
    """
    if not isinstance(schema, dict) or _is_resource(schema):
        return schema
    found = dict(schema)
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            found[keyword] = root + value[1:]
        elif keyword in _OF_SCHEMAS and isinstance(value, dict):
            found[keyword] = {name: moved(one, root) for name, one in value.items()}
        elif keyword in (*_LISTS, "items") and isinstance(value, list):
            found[keyword] = [moved(one, root) for one in value]
        elif keyword in _ONE:
            found[keyword] = moved(value, root)
    return found


def _is_resource(schema: Mapping[str, Any]) -> bool:
    name = schema.get("$id")
    return isinstance(name, str) and not name.startswith("#")


def _without_annotations(schema: Mapping[str, Any], *, is_root: bool) -> dict[str, Any]:
    found = {keyword: value for keyword, value in schema.items() if keyword not in _ANNOTATIONS}
    named = found.pop("$schema", None)
    dialect = _DIALECT.fullmatch(named) if isinstance(named, str) and is_root else None
    if dialect:  # as the library spells it
        old, new = dialect.groups()
        found["$schema"] = (
            f"http://json-schema.org/{old}/schema#" if old else f"https://json-schema.org/{new}/schema"
        )
    return found


def _condition(found: dict[str, Any], _: Schema) -> bool:
    branches = [found.pop(name, True) for name in ("then", "else")]
    return all(_says_nothing(branch) for branch in branches)


def _dependencies(found: dict[str, Any], value: Schema) -> bool:
    return isinstance(value, dict) and _requires(found, value)


def _anchor(found: dict[str, Any], value: Schema) -> bool:
    return bool(found.setdefault("$anchor", value) == value)


def _reference(found: dict[str, Any], value: Schema) -> bool:
    return bool(found.setdefault("$ref", value) == value)


def _any_of(found: dict[str, Any], value: Schema) -> None:
    """Let alternatives that may not exclude each other be any of these."""
    if "anyOf" in found:
        _and_all(found, [{"anyOf": value}])
    else:
        found["anyOf"] = value


def _and_all(found: dict[str, Any], schemas: Sequence[Schema]) -> None:
    others = found.get("allOf", [])
    if schemas and isinstance(others, list):  # else the library refuses it
        found["allOf"] = [*others, *schemas]


def _says_nothing(schema: Schema) -> bool:
    return schema is True or schema == {}


def _at_most(value: object, limit: int) -> bool:
    return isinstance(value, int | float) and value <= limit


def _contains(found: dict[str, Any], value: Schema) -> bool:
    """Enforce `contains` where each item matches it anyway: then it counts the items."""
    least, most = found.pop("minContains", 1), found.pop("maxContains", None)
    if (least, most) == (0, None):
        return True
    if "prefixItems" in found or not (_says_nothing(value) or value == found.get("items")):
        return False
    limits = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
    for keyword, limit in limits.items():
        other = found.get(keyword, limit)
        if not isinstance(limit, int) or not isinstance(other, int):
            return False
        found[keyword] = max(other, limit) if keyword == "minItems" else min(other, limit)
    return True


def _names(found: dict[str, Any], value: Schema) -> bool:
    """Enforce names that are a pattern, length, format or list, on an object without other names."""
    if _says_nothing(value):
        return True
    if not isinstance(value, dict):
        return False
    others, known = found.get("additionalProperties", True), found.get("properties", {})
    names = _as_pattern({key: one for key, one in value.items() if (key, one) != ("type", "string")})
    if not names:
        return True
    has_list = isinstance(names.get("enum"), list) and isinstance(known, dict)
    if has_list and len(names) == 1 and "patternProperties" not in found:
        allowed = [name for name in names["enum"] if isinstance(name, str)]
        found["properties"] = {name: known.get(name, others) for name in allowed} | {
            name: False for name in known if name not in allowed
        }
    elif _is_plain(names.get("pattern")) and len(names) == 1 and not _names_properties(found):
        found["patternProperties"] = {names["pattern"]: others}
    else:
        return False
    found["additionalProperties"] = False
    return True


def _as_pattern(names: dict[str, Any]) -> dict[str, Any]:
    """Return a schema of names with a length or a format as one with a pattern.

    >>> _as_pattern({"minLength": 2}), _as_pattern({"const": "a"})
    ({'pattern': '^[\\\\s\\\\S]{2,}$'}, {'enum': ['a']})
    """
    if names.keys() == {"const"}:
        return {"enum": [names["const"]]}
    if names and names.keys() <= {"minLength", "maxLength"} and all(map(_is_count, names.values())):
        least, most = names.get("minLength", 0), names.get("maxLength", "")
        return {"pattern": rf"^[\s\S]{{{least},{most}}}$"}
    form = names.get("format")
    if (
        names.keys() == {"format"}
        and isinstance(form, str)
        and (form in _FORMATS_OF_NAMES or form not in FORMATS)
    ):
        return {"pattern": _FORMATS_OF_NAMES[form]} if form in _FORMATS_OF_NAMES else {}
    return names


def _format(found: dict[str, Any], value: Schema) -> bool:
    """Enforce a format that the library has, and pydantic's `uuid4`; leave out another, an annotation."""
    version = _UUID.fullmatch(value) if isinstance(value, str) else None
    if version:
        _and_all(found, [{"pattern": f"^.{{14}}{version[1]}.{{4}}[89abAB]"}])
    if version or not isinstance(value, str) or value in FORMATS:
        found["format"] = "uuid" if version else value
    return True


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _pattern(found: dict[str, Any], value: Schema) -> bool:
    if not isinstance(value, str):
        found["pattern"] = value  # the library says what is wrong
        return True
    patterns = without_look_around(value)
    for pattern in patterns.all_of[:1]:
        found["pattern"] = pattern
    _and_all(found, [{"pattern": pattern} for pattern in patterns.all_of[1:]])
    return patterns.is_exact


def _pattern_properties(found: dict[str, Any], value: Schema) -> bool:
    """Leave out patterns that need look-around, and what holds for names that match none."""
    if isinstance(value, dict) and not all(map(_is_plain, value)):
        found.pop("additionalProperties", None)
        return False
    found["patternProperties"] = value
    return True


def _is_plain(pattern: object) -> bool:
    """Return whether a pattern needs no look-around."""
    return isinstance(pattern, str) and without_look_around(pattern).all_of == (pattern,)


def _names_properties(found: Mapping[str, Any]) -> bool:
    return bool(found.get("properties") or found.get("patternProperties"))


def _requires(found: dict[str, Any], dependent: Mapping[str, Any]) -> bool:
    """Enforce `dependentRequired` by an alternative for each key: the key is absent, or all are required."""
    dependent = {key: names for key, names in dependent.items() if names}
    if len(dependent) > _MAX_DEPENDENT or not all(isinstance(names, list) for names in dependent.values()):
        return False
    choices = [
        {"anyOf": [{"required": [key, *names]}, {"properties": {key: False}}]}
        for key, names in dependent.items()
    ]
    _and_all(found, choices)
    return True


def _closes(other: str) -> Rewrite:
    """Enforce `unevaluated...` where no other schema evaluates: then it is what `other` is."""

    def rewrite(found: dict[str, Any], value: Schema) -> bool:
        if not _says_nothing(value) and any(name in found for name in _EVALUATE):
            return False
        found.setdefault(other, value)
        return True

    return rewrite


def _excludes(alternatives: list[Schema], resolve: Resolve) -> bool:
    """Return whether no value matches two alternatives, as far as types and constants tell."""
    whole = [resolve(one) for one in alternatives]
    lists = [_constants(one) if isinstance(one, dict) else None for one in whole]
    constants = [value for values in lists if values is not None for value in values]
    with suppress(TypeError):  # some are lists or objects
        if None not in lists and len(set(constants)) == len(constants):
            return True
    if len(alternatives) > _MAX_ONE_OF:
        return False
    pairs = ((a, b) for i, a in enumerate(whole) for b in whole[:i])
    return all(_differ(a, b, resolve) for a, b in pairs)


def _differ(first: Schema, second: Schema, resolve: Resolve, *, depth: int = 3) -> bool:
    if not isinstance(first, dict) or not isinstance(second, dict):
        return False in (first, second)
    ours, theirs = _types(first), _types(second)
    if ours and theirs and not ours & theirs:
        return True
    if (values := _constants(first)) is not None and (others := _constants(second)) is not None:
        return all(value != other for value in values for other in others)
    return (
        ours == theirs == {"object"}
        and depth > 0
        and any(
            _differ(
                resolve(first["properties"][name]),
                resolve(second["properties"][name]),
                resolve,
                depth=depth - 1,
            )
            for name in _required(first)
            if name in set(_required(second))
        )
    )


def _types(schema: Mapping[str, Any]) -> set[str]:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    found = {one for one in kinds if isinstance(one, str)}
    return found | {"integer"} if "number" in found else found


def _constants(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


_REWRITES: dict[str, Rewrite] = {
    "unevaluatedProperties": _closes("additionalProperties"),  # while the keywords that evaluate are there
    "unevaluatedItems": _closes("items"),
    "if": _condition,
    "then": lambda *_: True,  # without `if` it says nothing
    "else": lambda *_: True,
    "not": lambda _, value: value is False,
    "uniqueItems": lambda found, value: value is False or _at_most(found.get("maxItems"), 1),
    "contains": _contains,
    "minContains": lambda *_: True,  # without `contains` it says nothing
    "maxContains": lambda *_: True,
    "propertyNames": _names,
    "format": _format,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "dependencies": _dependencies,
    "dependentRequired": _dependencies,
    "dependentSchemas": lambda _, value: isinstance(value, dict) and all(map(_says_nothing, value.values())),
    "$dynamicAnchor": _anchor,
    "$dynamicRef": _reference,  # of one document, what these refer to is what `$ref` does
    "$recursiveRef": _reference,
    "$recursiveAnchor": lambda *_: True,  # a mark of what `$recursiveRef` may refer to
}
"""Keywords that the library lacks, in whole or in part. Each function gets a schema without its keyword, and
the value; it makes the schema say the same in other keywords and returns True, or returns False."""

_REWRITTEN = {*_REWRITES, *_ANNOTATIONS, "oneOf"}


def _required(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the properties that are required and described."""
    names, properties = schema.get("required"), schema.get("properties")
    if isinstance(names, list) and isinstance(properties, dict):
        yield from (name for name in names if isinstance(name, str) and name in properties)


def parts_of(schema: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Yield the pointers of a schema's parts, from the schema, with these parts."""
    for keyword, value in schema.items():
        if keyword in _OF_SCHEMAS and isinstance(value, dict):
            yield from ((f"/{keyword}/{_escaped(name)}", one) for name, one in value.items())
        elif keyword in (*_LISTS, "items") and isinstance(value, list):
            yield from ((f"/{keyword}/{index}", one) for index, one in enumerate(value))
        elif keyword in _ONE:
            yield f"/{keyword}", value


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
