"""From `response_format` and `tool_choice` to the grammar that the engine holds an answer to; pure."""

from collections.abc import Sequence

from penstock.serve.errors import ApiError
from penstock.serve.schema.chat import NamedTool, Tool
from penstock.serve.schema.generation import ResponseFormat


def grammar_of(wanted: ResponseFormat | None) -> str | None:
    """Return the grammar of an answer's form; None: any text.

    Raises:
        ApiError: no form can be demanded yet.
    """
    if wanted is None or wanted.type == "text":
        return None
    raise ApiError(400, "response_format can only be text yet.", param="response_format")


def grammar_of_calls(choice: str | NamedTool | None, tools: Sequence[Tool]) -> str | None:
    """Return the grammar of an answer that must be a call; None: it need not be one.

    Raises:
        ApiError: no call can be demanded yet.
    """
    if choice is None or choice in ("auto", "none") or not tools:
        return None
    raise ApiError(400, "tool_choice can only be auto or none yet.", param="tool_choice")
