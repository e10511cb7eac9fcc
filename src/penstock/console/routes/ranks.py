"""Routes of ranks: a heat map of one metric, ranks by steps; slow ranks; the reports of hangs."""

import math
from typing import Annotated, Any

import pybase64
from fastapi import APIRouter, Query
from starlette.responses import Response

from penstock.console.plain_json import PlainJson
from penstock.console.state import Console, Run
from penstock.obs.run_data.page_json import hangs_json, ranks_json
from penstock.obs.run_data.rank_columns import check_rank_metric

router = APIRouter(prefix="/api")

Reply = dict[str, Any]  # Any: JSON


@router.get("/runs/{run_id}/ranks")
def ranks(
    console: Console,
    run: Run,
    metric: str = "own_s",
    first: Annotated[float, Query(alias="from")] = 0,
    last: Annotated[float, Query(alias="to")] = math.inf,
    points: Annotated[int, Query(ge=1, le=20_000)] = 2000,
) -> Response:
    """Return a metric of RANK_METRICS as base64 of float32 [ranks, steps], and where the ranks ran.

    Of more records than `points`, neighbours share a column, which has the largest value of each rank. Tables
    of very many ranks have fewer columns than `points`. The means are over all records.
    """
    check_rank_metric(metric)
    table = console.rank_columns(run, metric).table(first=first, last=last, columns=points)
    others = ranks_json(table, console.columns(run), metric)
    values = pybase64.b64encode(table.values.astype("<f4").tobytes())  # some megabytes, which need no escapes
    body = b'%s,"values":"%s"}' % (bytes(PlainJson(others).body)[:-1], values)
    return Response(body, media_type=PlainJson.media_type)


@router.get("/runs/{run_id}/hangs")
def hangs(console: Console, run: Run) -> Reply:
    """Return the diagnosis of each hang, newest last, and the call stacks of the ranks to look at first."""
    return hangs_json(console.recent_hangs.read(run.files, console.columns(run).starts))
