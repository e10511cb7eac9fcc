"""GET /v1/models."""

from fastapi import APIRouter, Request

from penstock.serve.routes.asking import FAILURES, service_of
from penstock.serve.schema.others import Model, Models
from penstock.serve.served import Served

router = APIRouter()


@router.get("/v1/models", responses=FAILURES)
async def models(request: Request) -> Models:
    """List what requests may name: the model, and the adapters it is served with."""
    served = service_of(request).served
    return Models(data=[_model(name, served) for name in (served.name, *served.adapters)])


@router.get("/v1/models/{model:path}", responses=FAILURES)
async def model(model: str, request: Request) -> Model:
    """Describe one of them."""
    served = service_of(request).served
    served.adapter_of(model)
    return _model(model, served)


def _model(name: str, served: Served) -> Model:
    return Model(id=name, created=served.created, root=served.name, max_model_len=served.context)
