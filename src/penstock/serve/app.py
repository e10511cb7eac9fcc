"""The application: every route, behind the gate; the one file that knows their order."""

from collections.abc import Iterable, Iterator

from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from penstock import __version__
from penstock.engine.llm import LLM
from penstock.engine.sampling import Sampling
from penstock.serve.body import Bodies
from penstock.serve.bridge import Bridge
from penstock.serve.errors import add_handlers
from penstock.serve.gate import REQUEST_ID, Gate, Rules
from penstock.serve.limits import Admission, Limits
from penstock.serve.metrics import Metrics
from penstock.serve.routes import chat, completions, embeddings, health, models, page, responses, tokens
from penstock.serve.served import Served, Service
from penstock.serve.token_names import TokenNames
from penstock.text.template_process import TemplateProcess

ROUTERS = (
    completions.router,
    chat.router,
    responses.router,
    embeddings.router,
    models.router,
    tokens.router,
    health.router,
    page.router,
)


_NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""FastAPI's own spans and logs would tell an exporter of requests, and cost time in each."""


def build_service(
    llm: LLM,
    *,
    name: str,
    adapters: Iterable[str],
    limits: Limits,
    created: int,
    sampling: Sampling,
    splits_reasoning: bool,
) -> Service:
    """Return what routes need of a model; its `templates` are to be closed.

    Args:
        llm: stays the caller's.
        name: what requests call the model.
        adapters: names of those it was opened with.
        created: seconds since 1970.
        sampling: for what requests leave out.
        splits_reasoning: chats have what the model thought apart.
    """
    metrics = Metrics(llm.thread.stats)
    return Service(
        served=Served(
            name=name,
            words=llm.words,
            context=llm.capacity.context,
            vocab_size=llm.capacity.vocab_size,
            adapters=tuple(adapters),
            created=created,
            sampling=sampling,
            splits_reasoning=splits_reasoning,
        ),
        bridge=Bridge(llm.thread, admission=Admission(limits.max_open), metrics=metrics),
        limits=limits,
        bodies=Bodies(limits),
        metrics=metrics,
        templates=TemplateProcess(llm.words.template),
        names=TokenNames(llm.words.tokenizer),
    )


def build_app(service: Service, rules: Rules) -> ASGIApp:
    """Return the ASGI application that answers for a service.

    Args:
        rules: who may ask.
    """
    app = FastAPI(
        title="Penstock",
        version=__version__,
        description="Generates from one model, as the OpenAI API has it.",
        docs_url=None,  # these pages load scripts of others
        redoc_url=None,
        redirect_slashes=False,  # a redirect behind a gateway names the wrong address; see Gate
        telemetry=_NO_TELEMETRY,
    )
    app.state.service = service
    app.state.addresses = sorted(_addresses())
    add_handlers(app)
    for router in ROUTERS:
        app.include_router(router)
    metrics = service.metrics
    gated: ASGIApp = Gate(
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
        allow_headers=["*"],  # OpenAI's client for browsers sends a dozen of its own
        allow_private_network=True,  # asked where a page of the internet wants a server of this network
        expose_headers=["Retry-After", REQUEST_ID],
    )


def _addresses() -> Iterator[str]:
    """Yield where something is, but for the page's files and addresses that vary."""
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and route.include_in_schema and "{" not in route.path:
            yield route.path
