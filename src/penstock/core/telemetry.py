"""Settings of FastAPI that keep its own spans, metrics and logs off, for all servers of Penstock."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi.telemetry import TelemetryConfig

NO_TELEMETRY: "TelemetryConfig" = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
"""FastAPI's own spans and logs would send data of requests to an exporter, and cost time per request."""
