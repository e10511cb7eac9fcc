"""Schemas of a request that no grammar can be made of: which, where and why; pure.

One such schema does not take the other tools from a request: its function is not called, and the response
says so. The search compiles parts of schemas, so it is for requests that were refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import UsageError
from penstock.engine.sampling.schema_keywords import parts_of, place
from penstock.serve.chat.response_format import AnswerFormat, arguments_of, schema_of
from penstock.serve.chat.tools import ToolUse
from penstock.serve.errors import ApiError, api_error_of

Refusal = Callable[[Mapping[str, Any]], str | None]  # Any: JSON
"""Returns why a schema cannot be used; None: it can."""

_ANY = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Unusable:
    """A part of a schema that cannot be used."""

    path: str
    """Key of the request, such as "tools[3].function.parameters.properties.d"."""
    why: str

    def __str__(self) -> str:
        return f"{self.path} cannot be used: {self.why}"


def usable_tools(use: ToolUse, refusal: Refusal) -> tuple[ToolUse, dict[str, Unusable]]:
    """Return the tools whose schemas can be used, and what is wrong with the others, by function.

    Raises:
        ApiError: the schema of a strict function cannot be used, or that of each function.
    """
    unusable: dict[str, Unusable] = {}
    if refusal(_ANY) is not None:  # the reason is not in a schema
        return use, unusable
    must_work = False
    for function, at in use.callable():
        try:
            found = unusable_part(arguments_of(function, at), at, refusal)
        except UsageError as error:
            if function.strict or use.forced is not None:
                raise api_error_of(error, param="tools") from None
            found = Unusable(at, str(error))
        if found is not None:
            unusable[function.name] = found
            must_work |= function.strict is True or use.forced is not None
    left = tuple(tool for tool in use.allowed if tool.function.name not in unusable)
    if unusable and (must_work or not left):
        said = " ".join(map(str, unusable.values()))
        raise ApiError(f"{said} Correct it, or leave the function out.", param="tools")
    return replace(use, allowed=left), unusable


def located(error: ApiError, wanted: AnswerFormat, refusal: Refusal) -> ApiError:
    """Return the error of a request whose schema may be the reason, with the part that cannot be used."""
    try:
        schema = schema_of(wanted) if error.param == wanted.key and refusal(_ANY) is None else None
    except UsageError:  # a strict schema that cannot be enforced: the error says where
        schema = None
    found = None if schema is None else unusable_part(schema, wanted.schema_key, refusal)
    return error if found is None else ApiError(f"{found} Correct or simplify it.", param=wanted.key)


def unusable_part(schema: Mapping[str, Any], at: str, refusal: Refusal) -> Unusable | None:  # Any: JSON
    """Return the innermost part of a schema that cannot be used for the same reason; None: all can be.

    Args:
        at: key of the request that has the schema.
    """
    why = refusal(schema)
    if why is None:
        return None
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    pointer, part, is_found = "", schema, True
    while is_found:
        is_found = False
        for step, inner in parts_of(part):
            if isinstance(inner, dict) and refusal(definitions | inner) == why:
                pointer, part, is_found = pointer + step, inner, True
                break
    return Unusable(place(at, f"#{pointer}"), why)
