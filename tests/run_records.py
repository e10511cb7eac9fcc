"""Records of a run as its readers see them, without files."""

import io
import json

from penstock.core.files import TOKENIZER_FILE
from penstock.obs.metric_names import METRICS_FILE
from penstock.obs.report import ReportedRun
from penstock.obs.run_data.columns import RunColumns
from penstock.obs.run_data.discover import FoundRun
from penstock.obs.run_data.run_files import FileStamp
from penstock.obs.run_data.run_row import Summaries


class MemoryFiles:
    """Files of a run that has its records only."""

    location, is_stored = "memory", True

    def __init__(self, content, *, tokenizer=None):
        self._contents = {METRICS_FILE: content} | ({} if tokenizer is None else {TOKENIZER_FILE: tokenizer})

    def stamp(self, name):
        return FileStamp(0.0, len(self.open(name).read()), "")

    seen = stamp

    def open(self, name):
        if name not in self._contents:
            raise FileNotFoundError(name)
        return io.BytesIO(self._contents[name])

    def stamps(self, _):
        return {}


def lines_of(records):
    """Return records as the lines of a file."""
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def data_of(records):
    """Return what a run with these records has recorded."""
    columns = RunColumns(MemoryFiles(lines_of(records)))
    columns.update()
    return columns.data


def reported(records, recipe, *, name="first", tokenizer=None, **others):
    """Return a run with these records as a report takes it."""
    files = MemoryFiles(lines_of(records), tokenizer=tokenizer)
    columns = RunColumns(files)
    columns.update()
    found, rows = FoundRun(name, name, files), Summaries()
    row = rows.row(found) | {"state": "finished"}
    return ReportedRun(found=found, row=row, data=columns.data, recipe=recipe, **others)
