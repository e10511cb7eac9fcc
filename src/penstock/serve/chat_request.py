"""From a conversation to what the engine is asked, for every route that has one."""

from penstock.core import clock
from penstock.engine.request import Request
from penstock.serve.errors import ApiError
from penstock.serve.form_choice import wanted_form
from penstock.serve.prompts import chat_prompt, ending_of
from penstock.serve.requests import Asked, engine_request
from penstock.serve.schema.chat import ChatRequest, TemplateValue
from penstock.serve.served import Service
from penstock.serve.structure import grammar_of_answer
from penstock.serve.tool_choice import ToolUse
from penstock.serve.tool_forms import OPEN
from penstock.text.chat import ChatTemplate


def chat_request(body: ChatRequest, use: ToolUse, service: Service, *, client: str) -> Request:
    """Return what the engine is asked; slow for long conversations, so not for the event loop.

    Args:
        use: what the body says of tools.

    Raises:
        ApiError, UsageError: it cannot be answered.
        ModelError: the model's chat template fails.
    """
    _check(body)
    template = service.served.words.template
    variables = {**_effort(body, template), **(body.chat_template_kwargs or {})}
    prompt = chat_prompt(
        body.messages,
        service,
        tools=use.told,
        variables=variables,
        ending=ending_of(body),
    )
    grammar = grammar_of_answer(
        use,
        wanted_form(body),
        marked=OPEN in (template.tool_source or template.source or ""),
        several=body.parallel_tool_calls is not False,
    )
    asked = Asked(
        max_tokens=body.max_tokens or body.max_completion_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
        stop_texts=template.stop_texts,
        prompt_key="messages",
    )
    made = engine_request(
        body,
        prompt,
        asked,
        served=service.served,
        limits=service.limits,
        client=client,
        now_s=clock.monotonic(),
    )
    return service.checked(made)


def _effort(body: ChatRequest, template: ChatTemplate) -> dict[str, TemplateValue]:
    if body.reasoning_effort is None:
        return {}
    if not any("reasoning_effort" in (text or "") for text in (template.source, template.tool_source)):
        raise ApiError(
            400,
            "The model's chat template knows no reasoning_effort. Leave it out.",
            param="reasoning_effort",
        )
    return {"reasoning_effort": body.reasoning_effort}


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs: true.", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400, "max_tokens and max_completion_tokens are one thing. Give one.", param="max_tokens"
        )
    if body.max_tokens == 0:
        raise ApiError(400, "max_tokens must be at least 1 (got 0).", param="max_tokens")
