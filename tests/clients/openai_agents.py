"""OpenAI's Agents SDK, on both routes."""

import asyncio
from dataclasses import replace

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from parts import URL, State, done

set_tracing_disabled(True)
CLIENT = AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused")


@function_tool
def add(a: int, big: bool) -> str:
    """Add two numbers."""
    return "2" if big or a >= 0 else ""


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        settings = ModelSettings(max_tokens=300, temperature=0.0, verbosity="low", store=False)
        only = ModelSettings(max_tokens=300, extra_body={"guided_choice": ["The water rises."]})
        agent = Agent("brief", instructions="Be brief.", model=kind("tiny", CLIENT), model_settings=only)
        result = await Runner.run(agent, "the penstock")
        assert result.final_output == "The water rises."
        done(kind.__name__, "plain")
        streamed = Runner.run_streamed(agent, "the penstock")
        events = [event.type async for event in streamed.stream_events()]
        assert streamed.final_output == result.final_output
        assert events.count("raw_response_event") > 2
        done(kind.__name__, "streamed")
        must = replace(settings, tool_choice="add")
        caller = agent.clone(tools=[add], model_settings=must, tool_use_behavior="stop_on_first_tool")
        assert (await Runner.run(caller, "the penstock")).final_output == "2"
        done(kind.__name__, "tool")
        result = await Runner.run(agent.clone(output_type=State, model_settings=settings), "the penstock")
        assert isinstance(result.final_output, State)
        done(kind.__name__, "json_schema")


asyncio.run(main())
