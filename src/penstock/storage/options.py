"""Options of remote reading; defaults come from the environment and the size of the disk."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core import env
from penstock.core.errors import ConfigError, UsageError
from penstock.core.units import parse_count

_MAX_BYTES = 64 * 2**30
_SHARE_OF_FREE_DISK = 0.2
_CACHE_BYTES = "PENSTOCK_CACHE_BYTES"


def cache_bytes() -> int | None:
    """Return the disk limit of cached remote data: PENSTOCK_CACHE_BYTES, such as 64GiB; None if not set.

    Raises:
        UsageError: it is not a size.
    """
    try:
        return parse_count(env.variable(_CACHE_BYTES)) if env.has_variable(_CACHE_BYTES) else None
    except UsageError as error:
        raise UsageError(f"{_CACHE_BYTES}: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Options for fetching and caching remote objects."""

    cache_folder: Path = field(default_factory=env.cache_folder)
    """Cache folder, shared by all processes and runs of a machine. PENSTOCK_CACHE."""
    cache_bytes: int | None = field(default_factory=cache_bytes)
    """Disk limit of the cache; None: 64 GiB or a fifth of the free space, the lower. PENSTOCK_CACHE_BYTES."""
    read_around_bytes: int = 131_072
    """Minimum size of an unforeseen read. Larger: fewer requests, but more bytes that are not needed."""
    max_request_bytes: int = 4_194_304
    """Longer ranges are fetched by several parallel requests."""
    max_in_flight: int = 16
    """Prefetching requests in flight, per corpus and process."""
    connect_timeout_s: float = 10.0
    """Timeout for establishing a connection."""
    stall_timeout_s: float = 20.0
    """Silence in the middle of an answer after which the request is aborted and retried."""
    request_timeout_s: float = 120.0
    """Timeout of one whole request."""
    first_delay_s: float = 0.2
    """Delay before the first retry; doubles with each."""
    max_delay_s: float = 20.0
    """Longest delay between retries, unless the server asks for more with Retry-After."""
    deadline_s: float = 300.0
    """Total time for all attempts of one request; then the read fails. Long enough for a store's usual
    outage, short enough for a job to report it within the hour."""
    allow_plain_http: bool = field(default_factory=env.allow_plain_http)
    """True to allow http:// to other machines. PENSTOCK_ALLOW_HTTP=1."""

    def __post_init__(self) -> None:
        for name in ("read_around_bytes", "max_request_bytes", "max_in_flight", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0", got=getattr(self, name))

    def disk_limit(self, used: int) -> int:
        """Return the limit of the cache in bytes.

        Args:
            used: bytes in use now; they count as free, otherwise a full cache would shrink its own limit.
        """
        if self.cache_bytes is not None:
            return self.cache_bytes
        self.cache_folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.cache_folder).free
        return min(_MAX_BYTES, int((free + used) * _SHARE_OF_FREE_DISK))
