"""langchain-openai, on both routes, and its errors."""

from langchain_core.exceptions import ContextOverflowError, ModelAPIError, ModelNotFoundError
from langchain_openai import ChatOpenAI
from parts import HURRIED, LONG, URL, State, done


def add(a: int, big: bool) -> int:
    """Add two numbers."""
    return a + big


def model_of(*, uses_responses: bool, **more: object) -> ChatOpenAI:
    asked = {"model": "tiny", "base_url": f"{URL}/v1", "max_tokens": 300, **more}
    return ChatOpenAI(
        **asked, api_key="unused", temperature=0, max_retries=0, use_responses_api=uses_responses
    )


ENDLESS = {"base_url": f"{HURRIED}/v1", "max_tokens": None, "extra_body": {"ignore_eos": True}}
ERRORS = [
    (ContextOverflowError, {}, LONG),
    (ModelNotFoundError, {"model": "unknown"}, "the"),
    (ModelAPIError, ENDLESS, "the"),
]

for uses_responses in (False, True):
    route = "responses" if uses_responses else "chat"
    model = model_of(uses_responses=uses_responses)
    text = model.invoke("the penstock").text
    assert text
    done(route, "plain")
    assert "".join(chunk.text for chunk in model.stream("the penstock")) == text
    done(route, "streamed")
    [call] = model.bind_tools([add], tool_choice="add").invoke("the penstock").tool_calls
    assert set(call["args"]) == {"a", "big"}
    done(route, "tool")
    found = model.with_structured_output(State, method="json_schema").invoke("the penstock")
    assert isinstance(found, State)
    done(route, "json_schema")
    for error, more, text in ERRORS:
        try:
            model_of(uses_responses=uses_responses, **more).invoke(text)
        except error:
            done(route, error.__name__)
