"""From `tools` and `tool_choice` to which tools a model is told of, and which it may or must call; pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.serve.errors import ApiError
from penstock.serve.schema.body import ANY_JSON
from penstock.serve.schema.chat import AllowedChoice, NamedTool, Tool, ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request says of tools."""

    told: tuple[Tool, ...] = ()
    """The model reads of these."""
    allowed: tuple[Tool, ...] = ()
    """Of those told: what else it writes is text."""
    must_call: bool = False
    forced: str | None = None
    """The one that must be called: an answer is its arguments."""

    @property
    def schemas(self) -> dict[str, dict[str, ANY_JSON]]:
        """Return the schema of the arguments of each that may be called."""
        return {tool.function.name: tool.function.parameters or {} for tool in self.allowed}


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolUse:
    """Return what a request says of tools.

    With `allowed_tools` the model is told of all: the prompt begins as it did, so it is found computed.

    Raises:
        ApiError: two tools have one name, or one is to be called that is not there.
    """
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ApiError(400, f"Two tools have one name (got {names}).", param="tools")
    told = tuple(tools)
    match choice:
        case None | "auto":
            return ToolUse(told=told, allowed=told)
        case "none":
            return ToolUse()
    if not told:
        raise ApiError(
            400, "tool_choice asks for a call, but there are no tools. Give some.", param="tool_choice"
        )
    match choice:
        case NamedTool():
            _check_known([choice.function.name], names)
            return ToolUse(told=told, allowed=told, must_call=True, forced=choice.function.name)
        case AllowedChoice():
            wanted = [tool.function.name for tool in choice.allowed_tools.tools]
            _check_known(wanted, names)
            allowed = tuple(tool for tool in told if tool.function.name in wanted)
            return ToolUse(told=told, allowed=allowed, must_call=choice.allowed_tools.mode == "required")
    return ToolUse(told=told, allowed=told, must_call=True)


def _check_known(wanted: Sequence[str], names: Sequence[str]) -> None:
    for name in wanted:
        if name not in names:
            raise ApiError(
                400, f"tool_choice names {name!r}, which is none of the tools {names}.", param="tool_choice"
            )
