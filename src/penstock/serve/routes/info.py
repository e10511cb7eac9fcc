"""Routes about the server: /health, /ready, /metrics, /load, /version, /v1/models, and the web pages."""

from collections.abc import Iterator, Mapping
from functools import cache, partial
from html import escape
from importlib.resources import files
from typing import Any, Literal

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from penstock import __version__
from penstock.serve.routes.dependencies import FAILURES, service_of
from penstock.serve.schema.base import Reply
from penstock.serve.state import ModelInfo

Schema = Mapping[str, Any]
"""Any is JSON."""

_DEEPEST = 2
"""Maximum nesting of objects on the page."""


def api_page(document: Schema) -> str:
    """Return the HTML page of an OpenAPI document."""
    schemas = document.get("components", {}).get("schemas", {})
    routes = "".join(
        _route(method, path, operation, schemas)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    )
    title = escape(f"{document['info']['title']} {document['info']['version']}")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
</head>
<body>
<header>
<h1>{title}</h1><span class="space"></span><a href="openapi.json">openapi.json</a> <a href="./">Chat</a>
</header>
<main id="api">
{routes}</main>
</body>
</html>
"""


def _route(method: str, path: str, operation: Schema, schemas: Schema) -> str:
    said = escape(operation.get("description") or operation.get("summary") or "")
    content = operation.get("requestBody", {}).get("content", {})
    asked = "".join(_keys(one["schema"], schemas, 0) for one in content.values() if "schema" in one)
    return (
        f"<details><summary><code>{method.upper()} {escape(path)}</code> {said}</summary>\n"
        f"{asked or '<p>No request body.</p>'}</details>\n"
    )


def _keys(schema: Schema, schemas: Schema, depth: int) -> str:
    """Return an HTML table of the keys of an object, nested objects included."""
    schema = _resolved(schema, schemas)
    needed = schema.get("required", ())
    rows = ""
    for name, one in schema.get("properties", {}).items():
        told = escape(one.get("description", "")) + _inner(one, schemas, depth)
        key = f"<code>{escape(name)}</code>{' (required)' if name in needed else ''}"
        rows += f"<tr><td>{key}</td><td>{escape(_type(one, schemas))}</td><td>{told}</td></tr>\n"
    return f"<table>\n{rows}</table>\n" if rows else ""


def _inner(schema: Schema, schemas: Schema, depth: int) -> str:
    if depth == _DEEPEST:
        return ""
    return "".join(_keys(one, schemas, depth + 1) for one in _objects(schema, schemas))


def _objects(schema: Schema, schemas: Schema) -> Iterator[Schema]:
    """Yield the object types that a value may be or contain."""
    found = _resolved(schema, schemas)
    if "properties" in found:
        yield found
    for one in (*found.get("anyOf", ()), *found.get("oneOf", ()), found.get("items")):
        if one:
            yield from _objects(one, schemas)


def _type(schema: Schema, schemas: Schema) -> str:
    """Return the type of a value in words.

    >>> _type({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}, {})
    'list of integer'
    >>> _type({"enum": ["a", "b"]}, {})
    '"a", "b"'
    """
    if "$ref" in schema:
        found = _resolved(schema, schemas)
        return found.get("title", "object") if "properties" in found else _type(found, schemas)
    if "const" in schema:
        return f'"{schema["const"]}"' if isinstance(schema["const"], str) else str(schema["const"])
    if "enum" in schema:
        return ", ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in schema["enum"])
    forms = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if forms:
        kinds = dict.fromkeys(_type(form, schemas) for form in forms)
        return " or ".join(kind for kind in kinds if kind != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "any JSON"))


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


router = APIRouter()


class Health(Reply):
    """Health of the server; `reason` if it is not ok."""

    status: Literal["ok", "draining", "failed"]
    reason: str | None = None


_UNWELL: dict[int | str, dict[str, Any]] = {503: {"model": Health}}


@router.get("/health", response_model=Health, responses=_UNWELL)
async def health(request: Request) -> Response:
    """Liveness probe: 503 once the engine has failed and the server must be restarted."""
    failure = service_of(request).bridge.engine.failure
    return _said(Health(status="ok") if failure is None else Health(status="failed", reason=failure))


@router.get("/ready", response_model=Health, responses=_UNWELL)
async def ready(request: Request) -> Response:
    """Readiness probe: 503 if the engine has failed, or while the server drains after SIGTERM."""
    service = service_of(request)
    if service.draining and service.bridge.engine.failure is None:
        return _said(Health(status="draining"))
    return await health(request)


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return the metrics listed in docs/reference/metrics.md, in the Prometheus text format."""
    text = service_of(request).metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class Load(Reply):
    """Load of the server."""

    server_load: int


@router.get("/load")
async def load(request: Request) -> Load:
    """Return the number of answers running or waiting, for load balancers; path and key as in vLLM."""
    return Load(server_load=service_of(request).bridge.num_open)


class Version(Reply):
    """Version of Penstock."""

    version: str


@router.get("/version")
async def version() -> Version:
    """Return the version of Penstock."""
    return Version(version=__version__)


def _said(found: Health) -> Response:
    return JSONResponse(found.model_dump(), status_code=200 if found.status == "ok" else 503)


class Model(Reply):
    """A model or adapter that requests can name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "penstock"
    root: str
    """The base model; differs from `id` for an adapter."""
    max_model_len: int
    """Maximum tokens of prompt and answer together."""
    ignored_keys: list[str]
    """Keys of the model's config.json that were passed over by --ignore-key."""
    kernels: dict[str, str]
    """Operation -> name of the kernel that computes it, where several could: replicas whose kernels are equal
    give the same bits on equal devices."""


class Models(Reply):
    """List of models."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models", responses=FAILURES)
async def models(request: Request) -> Models:
    """List the model and its LoRA adapters."""
    served = service_of(request).served
    return Models(data=[_model(name, served) for name in (served.name, *served.adapters)])


@router.get("/v1/models/{model:path}", responses=FAILURES)
async def model(model: str, request: Request) -> Model:
    """Describe one model or adapter."""
    served = service_of(request).served
    return _model(served.of(model).name, served)


def _model(name: str, served: ModelInfo) -> Model:
    return Model(
        id=name,
        created=served.created,
        root=served.name,
        max_model_len=served.context,
        ignored_keys=list(served.ignored_keys),
        kernels=dict(served.kernels),
    )


page_router = APIRouter(include_in_schema=False)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


_FILES = (
    ("/", "penstock.serve", "index.html", "text/html"),
    ("/page.css", "penstock.serve", "page.css", "text/css"),
    ("/page.js", "penstock.serve", "page.js", "text/javascript"),
    ("/chat.js", "penstock.obs", "chat.js", "text/javascript"),
    ("/dom.js", "penstock.obs", "dom.js", "text/javascript"),
)
"""Address, package, file and type. The console has the last two, which draw a chat, as well."""


async def _file(package: str, name: str, media_type: str) -> Response:
    return _reply(_content(package, name), media_type)


for _address, *_place in _FILES:
    page_router.add_api_route(_address, partial(_file, *_place), name=_address)


@page_router.get("/docs")
async def docs(request: Request) -> Response:
    """Return the API reference as HTML; FastAPI's own page loads third-party scripts."""
    return _reply(api_page(request.app.openapi()), "text/html")


def _reply(content: str | bytes, media_type: str) -> Response:
    return Response(content, media_type=f"{media_type}; charset=utf-8", headers=_HEADERS)


@cache
def _content(package: str, name: str) -> bytes:
    return (files(package) / "page" / name).read_bytes()
