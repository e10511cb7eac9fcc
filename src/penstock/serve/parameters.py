"""Fates of the published API's parameters: honoured, accepted as a hint, or refused.

A parameter is *honoured* if its body in `schema/` has a field for it. These tables have the others. A *hint*
is accepted without effect. A parameter that would change the answer is *refused* by name, unless its value
asks for what the server does anyway. Null is an absent key.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hint:
    """A parameter that is accepted without effect."""

    why: str
    """Why the answer is the same without it."""

    def is_refused(self, _value: object) -> bool:
        """Return False: every value is accepted."""
        return False

    def json_schema(self) -> dict[str, object]:
        """Return the JSON schema of the accepted values."""
        return {"description": f"Accepted, without effect. {self.why}"}


@dataclass(frozen=True, slots=True)
class RefusedParameter:
    """A parameter that is refused because it would change the answer."""

    why: str
    """What the server does not have, and what to do."""
    unless: tuple[object, ...] = ()
    """Values that ask for what the server does anyway."""

    def is_refused(self, value: object) -> bool:
        """Return True for every other value; 1.0 is 1, as in JSON, and true is not."""
        is_bool = isinstance(value, bool)
        return not any(isinstance(same, bool) == is_bool and value == same for same in self.unless)

    def json_schema(self) -> dict[str, object]:
        """Return the JSON schema of the accepted values; an empty enum means that every value is refused."""
        return {"enum": list(self.unless), "description": f"Other values are refused. {self.why}"}


NotHonoured = Hint | RefusedParameter

_NO_SERVICE = Hint("A setting of OpenAI's own service.")
_NO_CACHE = Hint("Prefixes of prompts are always cached; cache_salt separates clients.")
_NO_AUDIO = "Answers are text: leave it out."
_NOT_STORED = "Responses are not stored"
_NO_MODERATION = RefusedParameter("Nothing is moderated here: leave it out, and moderate in the client.")

_SERVICE: Mapping[str, NotHonoured] = {
    "user": Hint("Clients are named by their API keys."),
    "safety_identifier": Hint("Clients are named by their API keys."),
    "service_tier": _NO_SERVICE,
    "prompt_cache_key": _NO_CACHE,
    "prompt_cache_retention": _NO_CACHE,
    "prompt_cache_options": _NO_CACHE,
}
_VLLM: Mapping[str, NotHonoured] = {
    "skip_special_tokens": RefusedParameter("Answers have no special tokens: leave it out.", (True,)),
    "spaces_between_special_tokens": RefusedParameter(
        "Answers have no special tokens: leave it out.", (True,)
    ),
    "include_stop_str_in_output": RefusedParameter("Answers end before a stop text: leave it out.", (False,)),
    "use_beam_search": RefusedParameter("There is no beam search: leave it out.", (False,)),
}

COMPLETIONS: Mapping[str, NotHonoured] = {
    **_SERVICE,
    **_VLLM,
    "metadata": _NO_SERVICE,
    "store": Hint("Nothing is stored."),
    "suffix": RefusedParameter("Text is not inserted before a suffix: leave it out.", ("",)),
}
CHAT: Mapping[str, NotHonoured] = {
    **_SERVICE,
    **_VLLM,
    "metadata": _NO_SERVICE,
    "store": Hint("Nothing is stored."),
    "verbosity": Hint("Models here have no such setting: ask in the prompt."),
    "prediction": Hint("A prediction changes the speed, not the answer; see --drafts."),
    "audio": RefusedParameter(_NO_AUDIO),
    "function_call": RefusedParameter("It is deprecated: give tool_choice.", ("none", "auto")),
    "functions": RefusedParameter("They are deprecated: give tools.", ([],)),
    "moderation": _NO_MODERATION,
    "web_search_options": RefusedParameter("The server searches nothing: give a function in tools."),
    "add_special_tokens": RefusedParameter(
        "The chat template writes special tokens: leave it out.", (False,)
    ),
}
RESPONSES: Mapping[str, NotHonoured] = {
    **_SERVICE,
    **_VLLM,
    "image": Hint("There are no images for image to apply to."),
    "max_tool_calls": Hint("It counts calls of built-in tools, and there are none."),
    "stream_options": Hint("Streams are not padded, and always end with the token counts."),
    "access_programs": RefusedParameter("A model has one kind of access here: leave it out."),
    "background": RefusedParameter(
        "Background responses are not supported: leave background out, or stream.", (False,)
    ),
    "background_options": RefusedParameter(
        "Background responses are not supported: leave it out, or stream."
    ),
    "context_management": RefusedParameter("Conversations are not compacted: shorten input.", ([],)),
    "conversation": RefusedParameter(f"{_NOT_STORED}: send the earlier items in input instead."),
    "moderation": _NO_MODERATION,
    "n": RefusedParameter(
        "A response has one answer: send several requests, or use /v1/chat/completions.", (1,)
    ),
    "previous_response_id": RefusedParameter(f"{_NOT_STORED}: send the earlier items in input instead."),
    "prompt": RefusedParameter("There are no stored prompts: send the text in instructions and input."),
    "store": RefusedParameter(f"{_NOT_STORED}: leave store out, or give false.", (False,)),
    "truncation": RefusedParameter(
        "Conversations are not truncated: leave truncation out, or shorten input.", ("disabled",)
    ),
}
TEXT: Mapping[str, NotHonoured] = {"verbosity": CHAT["verbosity"]}
REASONING: Mapping[str, NotHonoured] = {
    "summary": Hint("The reasoning itself is returned, with --split-reasoning."),
    "generate_summary": Hint("The reasoning itself is returned, with --split-reasoning."),
    "context": RefusedParameter(
        "The chat template chooses the earlier reasoning it uses: leave it out.", ("auto",)
    ),
    "mode": RefusedParameter("There is one mode of reasoning: leave it out.", ("standard",)),
}
STREAM_OPTIONS: Mapping[str, NotHonoured] = {"include_obfuscation": Hint("Streams are not padded.")}
RESPONSE_TOOL: Mapping[str, NotHonoured] = {
    "allowed_callers": RefusedParameter("Only the model calls functions: leave it out.", (["direct"], [])),
    "async": RefusedParameter("Calls are not asynchronous: leave it out.", (False,)),
    "defer_loading": RefusedParameter("All tools are in the prompt: leave it out.", (False,)),
    "output_schema": Hint("The model sees outputs, not their schema."),
}


def refused_key(given: Mapping[str, object], not_honoured: Mapping[str, NotHonoured]) -> str | None:
    """Return the first key of an object that is refused with its value; None: there is none.

    >>> refused_key({"store": False, "image": {}, "prompt": None}, RESPONSES)
    >>> refused_key({"store": True}, RESPONSES)
    'store'
    """
    for key, fate in not_honoured.items():
        value = given.get(key)
        if value is not None and fate.is_refused(value):
            return key
    return None
