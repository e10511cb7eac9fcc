"""Chat request: from a conversation to an engine request, for all routes with conversations."""

from penstock.core import clock
from penstock.engine.request import Request
from penstock.serve.chat.prompt import chat_prompt, ending_of
from penstock.serve.chat.reasoning import MARKS as THOUGHT_MARKS
from penstock.serve.chat.response_format import call_form, grammar_of_answer, wanted_form
from penstock.serve.chat.tool_parsers import MARKS
from penstock.serve.chat.tools import ToolUse
from penstock.serve.engine_request import RouteOptions, check_logprobs, engine_request
from penstock.serve.errors import ApiError
from penstock.serve.schema.chat import ChatRequest
from penstock.serve.state import AppState


def chat_request(body: ChatRequest, use: ToolUse, service: AppState, *, client: str) -> Request:
    """Return the engine request of a conversation; slow for long ones, so not for the event loop.

    Args:
        use: tools that the request offers.

    Raises:
        ApiError, UsageError: the request is invalid or cannot be computed.
        ModelError: the model's chat template fails.
    """
    _check(body)
    served = service.served.of(body.model)
    template = served.text_processor.template
    named = {"reasoning_effort": body.reasoning_effort, "documents": body.documents}
    variables = {name: value for name, value in named.items() if value is not None}
    variables |= body.chat_template_kwargs or {}
    prompt = chat_prompt(
        body.messages,
        served,
        tools=use.told,
        variables=variables,
        ending=ending_of(body),
        truncates=body.truncate_prompt_tokens is not None,
    )
    added = served.text_processor.tokenizer.added
    wanted = wanted_form(body)
    grammar = grammar_of_answer(
        use,
        wanted,
        form=call_form(template),
        added=added,
        several=body.parallel_tool_calls is not False,
    )
    marks = {*(MARKS if use.allowed else ()), *(THOUGHT_MARKS if served.splits_reasoning else ())}
    asked = RouteOptions(
        max_tokens=body.max_tokens or body.max_completion_tokens,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
        stop_texts=template.stop_texts if grammar is None else (),
        shown_ids=frozenset(added[mark] for mark in marks if mark in added),
        prompt_key="messages",
    )
    made = engine_request(
        body,
        prompt,
        asked,
        served=served,
        limits=service.limits,
        client=client,
        now_s=clock.monotonic(),
    )
    check_logprobs([made], is_streamed=body.wants_stream)
    has_calls = use.must_call or wanted.form is None
    return service.checked(made, grammar_key="tools" if has_calls else wanted.key)


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs: true.", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise ApiError(400, "logprob_token_ids is given without logprobs: true.", param="logprob_token_ids")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(
            400, "max_tokens and max_completion_tokens are the same. Give one.", param="max_tokens"
        )
    if body.max_tokens == 0:
        raise ApiError(400, "max_tokens must be at least 1 (got 0).", param="max_tokens")
