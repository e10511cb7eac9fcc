"""GET /health, /ready, /metrics, /load and /version: for probes, Prometheus and gateways."""

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from penstock import __version__
from penstock.serve.routes.asking import service_of
from penstock.serve.schema.others import Health, Load, Version

router = APIRouter()

_UNWELL: dict[int | str, dict[str, Any]] = {503: {"model": Health}}


@router.get("/health", response_model=Health, responses=_UNWELL)
async def health(request: Request) -> Response:
    """Whether the server lives: 503 once its engine has failed, and it should be started again."""
    failure = service_of(request).bridge.engine.failure
    return _said(Health(status="ok") if failure is None else Health(status="failed", reason=failure))


@router.get("/ready", response_model=Health, responses=_UNWELL)
async def ready(request: Request) -> Response:
    """Whether requests should come here: 503 also from SIGTERM on."""
    service = service_of(request)
    if service.draining and service.bridge.engine.failure is None:
        return _said(Health(status="draining"))
    return await health(request)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics that docs/serving.md lists, in the text format of Prometheus."""
    text = service_of(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/load")
async def load(request: Request) -> Load:
    """How many answers are in the making or wait, as gateways that balance ask; vLLM's address and key."""
    return Load(server_load=service_of(request).bridge.num_open)


@router.get("/version")
async def version() -> Version:
    """Which Penstock this is."""
    return Version(version=__version__)


def _said(found: Health) -> Response:
    return JSONResponse(found.model_dump(), status_code=200 if found.status == "ok" else 503)
