"""A pytest plugin that writes what each test came to, as it ends, one JSON object a line.

The file is named by the variable PENSTOCK_ROWS. Objects: `collected` with all node ids, `broken` with a file
that cannot be imported or is skipped whole, `began`, and `ended`; with `status` (held, failed, skipped; not
computed on the null GPU, where only a comparison of numbers failed or nothing did) and `why`. After a failure
that left the GPU unusable, as an illegal access does, the process ends with code `POISONED`.
"""

import json
import os
import sys
from pathlib import Path

import pytest

from gpu_parts.child import POISONED
from gpu_parts.machine import is_null_gpu

_MAX_OF_WHY = 2000


class _Rows:
    def __init__(self, path):
        self._path = path
        self._found = {}
        self._is_null = is_null_gpu()

    def pytest_collectreport(self, report):
        if report.failed:
            self._write(broken=report.nodeid, status="failed", why=_end(report.longreprtext))
        elif report.skipped:
            self._write(broken=report.nodeid, status="skipped", why=_why_skipped(report))

    def pytest_collection_finish(self, session):
        self._write(collected=[item.nodeid for item in session.items])

    def pytest_runtest_logstart(self, nodeid):
        self._found = {"status": "not computed" if self._is_null else "held", "why": ""}
        self._write(began=nodeid)

    def pytest_runtest_logreport(self, report):
        if report.skipped:
            self._found = {"status": "skipped", "why": _why_skipped(report)}
        elif self._is_null and _compares(report):
            return
        elif report.failed and self._found["status"] != "failed":
            self._found = {"status": "failed", "why": _reason(report)}

    def pytest_runtest_logfinish(self, nodeid):
        self._write(ended=nodeid, **self._found)
        if self._found["status"] == "failed" and not _computes():
            os._exit(POISONED)

    def _write(self, **record):
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


_SIGNS = ("numbers that are not finite", "math domain error")


def _compares(report):
    """True if a test failed by numbers that no device computed: it compared them, or took the root of one."""
    crash = getattr(report.longrepr, "reprcrash", None)
    said = "" if crash is None else crash.message
    return said.startswith(("assert ", "AssertionError")) or any(sign in said for sign in _SIGNS)


def _why_skipped(report):
    return report.longrepr[2].removeprefix("Skipped: ")


def _reason(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    return _end(crash.message if crash else report.longreprtext)


def _end(text):
    return (
        text if len(text) <= _MAX_OF_WHY else text[: _MAX_OF_WHY // 2] + " ... " + text[-_MAX_OF_WHY // 2 :]
    )


def _computes():
    """True if the process's GPU still answers; also where it has none."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


@pytest.hookimpl
def pytest_configure(config):
    config.pluginmanager.register(_Rows(Path(os.environ["PENSTOCK_ROWS"])))
