"""The ASGI application: all routes behind the request middleware; the only file that knows their order."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from penstock import __version__
from penstock.core.telemetry import NO_TELEMETRY
from penstock.engine.llm import LLM
from penstock.engine.sampling_params import Sampling
from penstock.serve.admission import Admission
from penstock.serve.errors import add_handlers
from penstock.serve.limits import ServerLimits
from penstock.serve.metrics import Metrics
from penstock.serve.middleware import REQUEST_ID, AccessPolicy, RequestMiddleware
from penstock.serve.output_stream import Bridge
from penstock.serve.request_body import Bodies
from penstock.serve.routes import chat, completions, embeddings, info, responses, tokens
from penstock.serve.state import AppState, ModelInfo
from penstock.serve.token_strings import TokenNames
from penstock.text.template_process import TemplateProcess

ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    embeddings.router,
    info.router,
    tokens.router,
    info.page_router,
)


def build_service(
    llm: LLM,
    *,
    name: str,
    adapters: Iterable[str],
    limits: ServerLimits,
    created: int,
    sampling: Sampling,
    splits_reasoning: bool,
    ignored_keys: tuple[str, ...] = (),
) -> AppState:
    """Return the state of the application for a model; the caller closes it.

    Args:
        llm: the engine; not closed here.
        name: model name in requests.
        adapters: names of the LoRA adapters.
        created: Unix time of the start, in seconds.
        sampling: defaults for values that requests leave out.
        splits_reasoning: chat answers have the model's reasoning in `reasoning_content`.
        ignored_keys: keys of config.json that were passed over.
    """
    metrics = Metrics(llm.thread.stats)
    model = ModelInfo(
        name=name,
        text_processor=llm.text_processor,
        templates=TemplateProcess(llm.text_processor.template),
        names=TokenNames(llm.text_processor.tokenizer),
        context=llm.capacity.context,
        vocab_size=llm.capacity.vocab_size,
        created=created,
        sampling=sampling,
        splits_reasoning=splits_reasoning,
        ignored_keys=ignored_keys,
        kernels=llm.kernels,
    )
    present = [model]
    for adapter in adapters:
        present.append(_of_adapter(adapter, present, llm))
    return AppState(
        served=replace(model, adapters={one.name: one for one in present[1:]}),
        bridge=Bridge(llm.thread, admission=Admission(limits.max_open), metrics=metrics),
        limits=limits,
        bodies=Bodies(limits),
        metrics=metrics,
    )


def _of_adapter(adapter: str, present: list[ModelInfo], llm: LLM) -> ModelInfo:
    """Return an adapter as clients see it.

    Args:
        present: the model and the adapters before; one with the same template or tokenizer shares it.
    """
    text_processor = llm.text_processor.of(adapter)
    template, tokenizer = text_processor.template, text_processor.tokenizer
    templates = (one.templates for one in present if one.text_processor.template == template)
    names = (one.names for one in present if one.text_processor.tokenizer is tokenizer)
    return replace(
        present[0],
        name=adapter,
        adapter=adapter,
        text_processor=text_processor,
        templates=next(templates, None) or TemplateProcess(template),
        names=next(names, None) or TokenNames(tokenizer),
        vocab_size=llm.thread.engine.vocab_size_of(adapter),
    )


def build_app(service: AppState, rules: AccessPolicy) -> ASGIApp:
    """Return the ASGI application.

    Args:
        rules: API keys and allowed origins.
    """
    app = FastAPI(
        title="Penstock",
        version=__version__,
        description="OpenAI-compatible server for one model.",
        docs_url=None,  # these pages load third-party scripts
        redoc_url=None,
        redirect_slashes=False,  # a redirect behind a gateway names the wrong address; see RequestMiddleware
        telemetry=NO_TELEMETRY,
    )
    app.state.service = service
    app.state.addresses = sorted(_addresses())
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    metrics = service.metrics
    gated: ASGIApp = RequestMiddleware(
        app,
        rules=rules,
        bodies=service.bodies,
        on_done=lambda route, status, seconds: metrics.request(route=route, status=status, seconds=seconds),
    )
    if not rules.origins:
        return gated
    return CORSMiddleware(
        gated,
        allow_origins=sorted(rules.origins),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's browser client sends a dozen of its own
        allow_private_network=True,  # needed when a public web page calls a server in a private network
        expose_headers=["Retry-After", REQUEST_ID],
    )


def _addresses() -> Iterator[str]:
    """Yield the paths of the documented routes without path parameters."""
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and route.include_in_schema and "{" not in route.path:
            yield route.path
