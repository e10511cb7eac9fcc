"""Route of ranks: a heat map of one metric, ranks by steps, and the reports of hangs."""

import math
from datetime import UTC, datetime
from typing import Annotated, Any

import pybase64
from fastapi import APIRouter, Query, Request

from penstock.console.runs.run_files import RunFiles
from penstock.console.state import console_of, run_of
from penstock.core.errors import UsageError, nearest
from penstock.obs.metric_names import HANGS_FOLDER, RANK_METRICS

router = APIRouter(prefix="/api")

_MOST_HANGS = 50


@router.get("/runs/{run_id}/ranks")
def ranks(
    request: Request,
    run_id: str,
    metric: str = "own_s",
    first: Annotated[float, Query(alias="from")] = 0,
    last: Annotated[float, Query(alias="to")] = math.inf,
    points: Annotated[int, Query(ge=1, le=20_000)] = 2000,
) -> dict[str, Any]:  # Any: JSON
    """Return a metric of RANK_METRICS as base64 of float32 [ranks, steps], and where the ranks ran.

    Of more records than `points`, neighbours share a column, which has the largest value of each rank. Tables
    of very many ranks have fewer columns than `points`.
    """
    if metric not in RANK_METRICS:
        raise UsageError("Ranks have no such metric", got=metric, fix=nearest(metric, list(RANK_METRICS)))
    run = run_of(request, run_id)
    columns = console_of(request).rank_columns(run, metric)
    table = columns.table(first=first, last=last, columns=points)
    return {
        "steps": table.steps,
        "records": table.num_records,
        "num_ranks": len(table.values),
        "starts": [
            {"column": column, "hosts": places.hosts, "devices": places.devices, "nics": places.nics}
            for column, places in sorted(table.places.items())
        ],
        "metric": metric,
        "metrics": list(RANK_METRICS),
        "values": pybase64.b64encode_as_string(table.values.astype("<f4").tobytes()),
        "hangs": _hangs(run.files),
    }


def _hangs(files: RunFiles) -> list[dict[str, str]]:
    return [
        {
            "time": datetime.fromtimestamp(modified_s, UTC).isoformat(timespec="seconds"),
            "text": f"{HANGS_FOLDER}/{name}",
        }
        for name, modified_s in sorted(files.modified(HANGS_FOLDER).items())[-_MOST_HANGS:]
    ]
