"""inspect-ai, on both routes."""

import asyncio

from inspect_ai.model import GenerateConfig, ResponseSchema, get_model
from inspect_ai.tool import ToolFunction, ToolInfo, ToolParams
from inspect_ai.util import json_schema
from parts import LONG, URL, State, done

TOOL = ToolInfo(
    name="add",
    description="Add two numbers",
    parameters=ToolParams(
        properties={"a": json_schema(int), "big": json_schema(bool)}, required=["a", "big"]
    ),
)


async def main() -> None:
    for uses_responses in (False, True):
        route = "responses" if uses_responses else "chat"
        config = GenerateConfig(max_tokens=300, temperature=0.0, max_retries=0)
        model = get_model(
            "openai/tiny" if uses_responses else "openai-api/penstock/tiny",
            config=config,
            base_url=f"{URL}/v1",
            api_key="unused",
            memoize=False,
            **({"responses_api": True} if uses_responses else {}),
        )
        assert (await model.generate("the penstock")).completion
        done(route, "plain")
        said = await model.generate("the penstock", tools=[TOOL], tool_choice=ToolFunction("add"))
        [call] = said.message.tool_calls
        assert set(call.arguments) == {"a", "big"}
        done(route, "tool")
        form = ResponseSchema(name="state", json_schema=json_schema(State))
        said = await model.generate("the penstock", config=GenerateConfig(response_schema=form))
        assert State.model_validate_json(said.completion)
        done(route, "json_schema")
        assert (await model.generate(LONG)).stop_reason == "model_length"
        done(route, "context")


asyncio.run(main())
