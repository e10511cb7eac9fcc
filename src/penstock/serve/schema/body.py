"""What all requests and answers are made of: strict objects, names, and what a key that is left out means."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(max_length=256)]

FIRST: Any = Field(fail_fast=True)
"""Of a list: only its first mistake is told. A body has room for a million, and telling them holds all up."""

ANY_JSON = Any
"""JSON that is handed on as it came, such as a JSON schema."""


def _is_none(value: object) -> bool:
    return value is None


ABSENT: Any = Field(default=None, exclude_if=_is_none)
"""Of a reply: null is not written."""

RETURNED: Any = Field(default=None, exclude=True)
"""Of a message: what the openai client's objects have besides, and come back with; without effect."""


class Body(BaseModel):
    """A request: unknown keys and values of another type are errors, never dropped or bent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OneOf:
    """Of a union: what is none of its forms is told them, and not of each why it is not that.

    Args:
        wanted: the forms.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Hear of the union's schema, and say so in it."""
        schema = handler(source)
        assert schema["type"] == "union", schema["type"]
        return {**schema, "custom_error_type": "one_of", "custom_error_message": f"Must be {self._wanted}"}


class Reply(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")
