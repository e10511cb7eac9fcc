"""Progress of a run, from the Prometheus endpoint of its first rank."""

import math
import re
import socket
from collections.abc import Sequence
from contextlib import suppress

from penstock.core import clock
from penstock.obs.metric_names import training_metric

_ANSWER_S = 1.0
_ALL_S = 3.0
"""All pods of a run answer within this time, or are not asked: other runs wait."""
_MAX_BYTES = 1 << 20
_FIELDS = {
    "step": training_metric("step"),
    "loss": training_metric("loss"),
    "tokensPerSecond": training_metric("tokens_per_s"),
    "lastCheckpoint": training_metric("checkpoint_step"),
    "steps": "penstock_train_steps_wanted",
}
_WHOLE = ("step", "lastCheckpoint", "steps")
Progress = dict[str, float | int]


def progress_of(page: str) -> Progress:
    """Return the fields of a status from a page of metrics.

    >>> progress_of('penstock_train_step{run="a"} 12.0\\npenstock_train_loss{run="a"} 2.5')
    {'step': 12, 'loss': 2.5}
    """
    found: Progress = {}
    for field, metric in _FIELDS.items():
        match = re.search(rf"^{metric}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
        if match and math.isfinite(value := float(match[1])):
            found[field] = int(value) if field in _WHOLE else float(f"{value:.6g}")
    return found


def ask_pods(addresses: Sequence[str], port: int) -> Progress:
    """Return the progress that the first rank tells, in whichever pod it is; empty: none answered."""
    end = clock.monotonic() + _ALL_S
    for address in addresses:
        with suppress(OSError, ValueError):
            if found := progress_of(_page(address, port, min(end, clock.monotonic() + _ANSWER_S))):
                return found
    return {}


def _page(address: str, port: int, end: float) -> str:
    """Return the page of metrics of a pod, which is not trusted.

    HTTP clients of the standard library follow redirects, use proxies, and limit the time of each read only.

    Raises:
        OSError: it did not answer until `end`.
        ValueError: it answered something else.
    """
    with socket.create_connection((address, port), timeout=_until(end)) as pod:
        pod.sendall(b"GET /metrics HTTP/1.0\r\nHost: metrics\r\n\r\n")
        found = bytearray()
        while len(found) < _MAX_BYTES:
            pod.settimeout(_until(end))
            if not (more := pod.recv(1 << 16)):
                break
            found += more
    head, _, page = found.decode(errors="replace").partition("\r\n\r\n")
    if not re.match(r"HTTP/1\.[01] 200 ", head):
        raise ValueError(f"{address}:{port} gives no page of metrics: {head[:100]}")
    return page


def _until(end: float) -> float:
    if (left := end - clock.monotonic()) <= 0:
        raise TimeoutError
    return left
