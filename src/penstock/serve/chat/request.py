"""Chat request: from a conversation to an engine request, for all routes with conversations."""

from penstock.core import clock
from penstock.engine.request import Request
from penstock.serve.chat.prompt import chat_prompt, ending_of
from penstock.serve.chat.reasoning import MARKS as THOUGHT_MARKS
from penstock.serve.chat.response_format import call_form, grammar_of_answer, not_enforced, wanted_form
from penstock.serve.chat.tool_parsers import MARKS
from penstock.serve.chat.tools import ToolUse
from penstock.serve.chat.unusable import located, usable_tools
from penstock.serve.engine_request import RouteOptions, check_logprobs, engine_request
from penstock.serve.errors import ApiError
from penstock.serve.schema.chat import ChatRequest
from penstock.serve.state import AppState


def chat_request(
    body: ChatRequest, use: ToolUse, service: AppState, *, client: str
) -> tuple[Request, tuple[str, ...]]:
    """Return the engine request of a conversation, and what of its schemas is not enforced.

    Slow for long ones, so not for the event loop.

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
    marks = {*(MARKS if use.allowed else ()), *(THOUGHT_MARKS if served.splits_reasoning else ())}
    wanted = wanted_form(body)

    def grammar_with(use: ToolUse) -> str | None:
        several = body.parallel_tool_calls is not False
        return grammar_of_answer(use, wanted, form=call_form(template), added=added, several=several)

    def made_with(grammar: str | None) -> Request:
        asked = RouteOptions(
            max_tokens=body.max_tokens or body.max_completion_tokens,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
            stop_texts=template.stop_texts if grammar is None else (),
            shown_ids=frozenset(added[mark] for mark in marks if mark in added),
            prompt_key="messages",
        )
        limits, now_s = service.limits, clock.monotonic()
        made = engine_request(body, prompt, asked, served=served, limits=limits, client=client, now_s=now_s)
        check_logprobs([made], is_streamed=body.wants_stream)
        key = "tools" if use.must_call or wanted.form is None else wanted.key
        return service.checked(made, grammar_key=key)

    try:
        return made_with(grammar_with(use)), not_enforced(use, wanted)
    except ApiError as error:
        if error.param not in ("tools", wanted.key):
            raise
        refusal = service.refusal(made_with(None))
        usable, unusable = usable_tools(use, refusal)
        if not unusable:
            raise located(error, wanted, refusal) from None
    missed = [f"{str(one).removesuffix('.')} ({name!r} is not called)" for name, one in unusable.items()]
    return made_with(grammar_with(usable)), (*not_enforced(usable, wanted), *missed)


def _check(body: ChatRequest) -> None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs is given without logprobs: true.", param="top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise ApiError("logprob_token_ids is given without logprobs: true.", param="logprob_token_ids")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError("max_tokens and max_completion_tokens are the same. Give one.", param="max_tokens")
    if body.max_tokens == 0:
        raise ApiError("max_tokens must be at least 1 (got 0).", param="max_tokens")
