"""Routes of servers: those of the command line, and what their /metrics pages said while somebody looked."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from penstock.console.servers.charts import CHARTS
from penstock.console.state import console_of
from penstock.core.errors import UsageError

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON


@router.get("/servers")
def servers(request: Request) -> Reply:
    """Return the names and addresses of the servers, and what is drawn of each; none of them is asked."""
    found = console_of(request).servers
    return {
        "servers": [{"name": one.server.name, "url": one.server.url} for one in found],
        "charts": [chart.as_json() for chart in CHARTS],
    }


@router.get("/servers/{number}")
def server(
    request: Request,
    number: int,
    after: Annotated[float, Query(allow_inf_nan=False)] = -1.0,
) -> Reply:
    """Return the points of a server after a time, with a new one; and why the newest reading failed."""
    found = console_of(request).servers
    if not 0 <= number < len(found):
        raise UsageError("This console knows no such server", got=number, fix="Start it with --server URL.")
    points = found[number].points(after=after)
    return {"points": points, "error": found[number].error}
