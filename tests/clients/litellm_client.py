"""litellm, on both routes, as a bridge for clients of Anthropic, and its errors."""

import asyncio
import json
import os
import threading
from contextlib import suppress

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be downloaded
import litellm
from litellm.litellm_core_utils.exception_mapping_utils import ExceptionCheckers
from parts import HURRIED, LONG, URL, State, done

litellm.suppress_debug_info = True
SERVER = {"model": "openai/tiny", "api_base": f"{URL}/v1", "api_key": "unused", "num_retries": 0}
HELLO = [{"role": "user", "content": "the penstock"}]
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


def chat() -> None:
    asked = {**SERVER, "messages": HELLO, "temperature": 0, "max_tokens": 100}
    text = litellm.completion(**asked).choices[0].message.content
    assert text
    done("chat", "plain")
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    done("chat", "streamed")
    [call] = (
        litellm.completion(
            **asked, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "add"}}
        )
        .choices[0]
        .message.tool_calls
    )
    assert "a" in json.loads(call.function.arguments)
    done("chat", "tool")
    found = litellm.completion(**asked, response_format=State)
    assert State.model_validate_json(found.choices[0].message.content)
    done("chat", "json_schema")


def responses() -> None:
    asked = {**SERVER, "input": "the penstock", "temperature": 0, "max_output_tokens": 100}
    text = litellm.responses(**asked).output_text
    assert text
    done("responses", "plain")
    events = list(litellm.responses(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type.endswith("text.delta")) == text
    done("responses", "streamed")
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS}
    [call] = litellm.responses(
        **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ).output
    assert "a" in json.loads(call.arguments)
    done("responses", "tool")
    form = {"type": "json_schema", "name": "state", "schema": State.model_json_schema()}
    found = litellm.responses(**asked, text={"format": form})
    assert State.model_validate_json(found.output_text)
    done("responses", "json_schema")


async def anthropic() -> None:
    reply = await litellm.anthropic.messages.acreate(**SERVER, messages=HELLO, max_tokens=50)
    assert reply["content"][0]["text"]
    done("anthropic", "plain")


def failure(kind: type[Exception], **asked: object) -> Exception:
    try:
        litellm.completion(**{**SERVER, "messages": HELLO, **asked})
    except kind as error:
        return error
    raise AssertionError(kind)


def errors() -> None:
    long = [{"role": "user", "content": LONG}]
    for asked in ({"messages": long}, {"max_tokens": 10**5}, {"messages": long * 9}):
        error = failure(litellm.ContextWindowExceededError, **asked)
        assert ExceptionCheckers.is_error_str_context_window_exceeded(str(error))
        assert not ExceptionCheckers.is_error_str_rate_limit(str(error), 400)
    done("errors", "context")
    failure(litellm.NotFoundError, model="openai/unknown")
    done("errors", "model")
    endless = {"api_base": f"{HURRIED}/v1", "extra_body": {"ignore_eos": True}, "max_retries": 0}
    failure(litellm.Timeout, **endless)
    done("errors", "timeout")
    begun = threading.Event()

    def hold() -> None:
        asked = {**SERVER, "messages": HELLO, **endless, "n": 2, "stream": True}
        with suppress(litellm.exceptions.MidStreamFallbackError):  # its second is over
            for _ in litellm.completion(**asked):
                begun.set()

    holder = threading.Thread(target=hold)
    holder.start()
    assert begun.wait(60)
    failure(litellm.RateLimitError, **endless)
    holder.join()
    done("errors", "rate limit")


chat()
responses()
asyncio.run(anthropic())
errors()
