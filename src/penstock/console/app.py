"""The console as an ASGI application: pages, routes and the rules of access; the only file that knows all."""

import mimetypes
import signal
import socket
from collections.abc import Callable
from importlib.resources import files
from pathlib import PurePosixPath
from types import FrameType

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import Response
from starlette.types import ASGIApp

from penstock import __version__
from penstock.console.access import AccessMiddleware, refusal
from penstock.console.plain_json import PlainJson
from penstock.console.routes import (
    control,
    curves,
    models,
    ranks,
    rows,
    runs,
    stream,
    traces,
)
from penstock.console.state import ConsoleState
from penstock.console.workers.data_process import QuestionRefused
from penstock.console.workers.model_slot import ModelBusy
from penstock.core.errors import PenstockError
from penstock.core.telemetry import NO_TELEMETRY
from penstock.obs.run_data.discover import UnknownRun

_GRACE_S = 1
"""Seconds for streams to end after a signal."""

_PAGES = {
    "page": ("penstock.console", ("page",)),
    "charts": ("penstock.obs", ("page", "page/vendor")),
}
"""Address -> package and folders of the files under it."""

_STATUSES = ((UnknownRun, 404), (ModelBusy, 409))
"""Errors of other statuses than 400."""

pages = APIRouter(include_in_schema=False)


@pages.get("/")
def first_page() -> Response:
    """Return the page of all views."""
    return page_file("page", "index.html")


@pages.get("/{place}/{name}")
def page_file(place: str, name: str) -> Response:
    """Return a script, style sheet or page."""
    package, folders = _PAGES.get(place, ("penstock.console", ()))
    if PurePosixPath(name).name == name and not name.startswith("."):
        for folder in folders:
            found = files(package).joinpath(folder, name)
            if found.is_file():
                kind = mimetypes.guess_type(name)[0] or "text/plain"
                return Response(found.read_bytes(), media_type=kind, headers={"cache-control": "no-cache"})
    return refusal(404, f"There is no {place}/{name}.")


ROUTERS = (
    runs.router,
    curves.router,
    stream.router,
    control.router,
    ranks.router,
    rows.router,
    models.router,
    traces.router,
)


def build_app(console: ConsoleState) -> ASGIApp:
    """Return the ASGI application; the caller closes the state."""
    app = FastAPI(
        title="Penstock console",
        version=__version__,
        docs_url=None,  # these pages load third-party scripts
        redoc_url=None,
        redirect_slashes=False,
        telemetry=NO_TELEMETRY,
        default_response_class=PlainJson,
    )
    app.state.console = console
    app.add_exception_handler(PenstockError, _refused)
    app.add_exception_handler(RequestValidationError, _unreadable)
    app.add_exception_handler(OSError, _failed)
    for router in (*ROUTERS, pages):
        app.include_router(router)
    return AccessMiddleware(app, console.rules)


def _refused(_: Request, error: Exception) -> Response:
    status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 400)
    if isinstance(error, QuestionRefused):
        status = error.status
    return refusal(status, str(error))


def _unreadable(_: Request, error: Exception) -> Response:
    """Name the first wrong field. FastAPI's answer repeats the input, which may be NaN or a surrogate."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return refusal(422, f"{'.'.join(map(str, first['loc']))}: {first['msg']}.")


def _failed(_: Request, error: Exception) -> Response:
    """Name the file that cannot be read or written: another user's, or one in the place of a folder."""
    return refusal(500, f"A file cannot be read or written: {error}.")


def serve(
    app: ASGIApp, sock: socket.socket, *, on_started: Callable[[], None], on_end: Callable[[], None]
) -> None:
    """Serve until a signal.

    Args:
        on_started: called when connections are accepted.
        on_end: called at the signal; must end open streams.
    """
    config = uvicorn.Config(
        app,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    _Server(config, on_started=on_started, on_end=on_end).run(sockets=[sock])


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, *, on_started: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._on_started, self._on_end = on_started, on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """End; a second signal ends at once. The signal is not raised again: leaving is the user's wish."""
        self._on_end()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
