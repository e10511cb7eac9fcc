"""pydantic-ai, on both routes."""

import asyncio

from openai import AsyncOpenAI
from parts import URL, State, done
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"max_tokens": 300, "temperature": 0.0, "parallel_tool_calls": False}


async def main() -> None:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused"))
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("tiny", provider=provider)
        plain = Agent(model, instructions="Be brief.", model_settings=SETTINGS)
        text = (await plain.run("the penstock")).output
        assert text
        done(kind.__name__, "plain")
        async with plain.run_stream("the penstock") as stream:
            assert "".join([piece async for piece in stream.stream_text(delta=True)]) == text
        done(kind.__name__, "streamed")
        found = await Agent(model, output_type=State, model_settings=SETTINGS).run("the penstock")
        assert isinstance(found.output, State)
        done(kind.__name__, "tool")
        found = await Agent(model, output_type=NativeOutput(State), model_settings=SETTINGS).run(
            "the penstock"
        )
        assert isinstance(found.output, State)
        done(kind.__name__, "json_schema")


asyncio.run(main())
