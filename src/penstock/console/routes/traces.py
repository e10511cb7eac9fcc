"""Routes of traces: the files of profiled steps, to be downloaded and opened in a viewer."""

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from fastapi import APIRouter
from starlette.responses import Response, StreamingResponse

from penstock.console.access import refusal
from penstock.console.state import Run
from penstock.obs.metric_names import TRACES_FOLDER

router = APIRouter(prefix="/api")

_NAME = re.compile(r"(trace|memory)-steps-\d{1,12}-to-\d{1,12}-rank-\d{5,6}\.(json\.gz|pickle)", re.ASCII)
"""Names that `penstock train` gives to traces; no other file is sent."""
_MAX_LISTED = 200
_READ_BYTES = 1 << 20


@router.get("/runs/{run_id}/traces")
def traces(run: Run) -> dict[str, Any]:  # Any: JSON
    """Return the newest traces of a run, newest first, and the number of all. Times are Unix times."""
    stamps = run.files.stamps(TRACES_FOLDER)
    found = sorted(filter(_NAME.fullmatch, stamps), key=lambda name: (-stamps[name].modified_s, name))
    return {
        "traces": [
            {"name": name, "bytes": stamps[name].size, "time": stamps[name].modified_s}
            for name in found[:_MAX_LISTED]
        ],
        "num_traces": len(found),
    }


@router.get("/runs/{run_id}/traces/{name}")
def trace(run: Run, name: str) -> Response:
    """Return a trace as a file to be saved."""
    files = run.files
    stamp = files.stamps(TRACES_FOLDER).get(name) if _NAME.fullmatch(name) else None
    if stamp is None:
        return refusal(404, "The run has no such trace.")
    try:
        file = files.open(f"{TRACES_FOLDER}/{name}")
    except OSError:
        return refusal(404, "The trace cannot be read.")
    headers = {
        "content-disposition": f'attachment; filename="{name}"',
        "content-length": str(stamp.size),
    }
    return StreamingResponse(
        _pieces(file, stamp.size), media_type="application/octet-stream", headers=headers
    )


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    with file:
        while size and (piece := file.read(min(size, _READ_BYTES))):
            size -= len(piece)
            yield piece
