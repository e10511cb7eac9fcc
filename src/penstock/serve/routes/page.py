"""GET /: the chat page, three files that ask nobody but this server."""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

router = APIRouter(include_in_schema=False)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/")
async def page() -> Response:
    """Return the page."""
    return _file("index.html", "text/html")


@router.get("/page.css")
async def style() -> Response:
    """Return how it looks."""
    return _file("page.css", "text/css")


@router.get("/page.js")
async def script() -> Response:
    """Return what it does."""
    return _file("page.js", "text/javascript")


def _file(name: str, media_type: str) -> Response:
    return Response(_content(name), media_type=f"{media_type}; charset=utf-8", headers=_HEADERS)


@cache
def _content(name: str) -> bytes:
    return (files("penstock.serve") / "page" / name).read_bytes()
