"""The knobs of remote reading; defaults come from the environment and the size of the disk."""

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from penstock.core import env
from penstock.core.errors import ConfigError

_MOST_BYTES = 64 * 2**30
_SHARE_OF_FREE_DISK = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """How remote objects are fetched and kept."""

    cache_folder: Path = field(default_factory=env.cache_folder)
    """Shared by all processes of a machine, and by runs. PENSTOCK_CACHE."""
    cache_bytes: int | None = field(default_factory=env.cache_bytes)
    """Disk it may take; None: 64 GiB or a fifth of what is free, whichever is less. PENSTOCK_CACHE_BYTES."""
    read_around_bytes: int = 131_072
    """What one unforeseen read fetches at least. More: fewer requests, more bytes that nobody asked for."""
    max_request_bytes: int = 4_194_304
    """Longer runs of bytes are fetched by several requests side by side."""
    max_in_flight: int = 16
    """Requests under way ahead of their use, per corpus and process."""
    connect_timeout_s: float = 10.0
    """For a connection to be made."""
    stall_timeout_s: float = 20.0
    """Silence in the middle of an answer after which the request is given up and tried again."""
    request_timeout_s: float = 120.0
    """For one whole request."""
    first_delay_s: float = 0.2
    """Before the first repetition; doubles from there."""
    max_delay_s: float = 20.0
    """Longest wait between repetitions, unless the server asks for more by Retry-After."""
    deadline_s: float = 300.0
    """All attempts at one request together; then the read fails. Long enough for a store's usual hiccup,
    short enough for a job to be told the same hour."""
    allow_plain_http: bool = field(default_factory=env.allow_plain_http)
    """Whether http:// may leave this machine. PENSTOCK_ALLOW_HTTP=1."""

    def __post_init__(self) -> None:
        for name in ("read_around_bytes", "max_request_bytes", "max_in_flight", "deadline_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0", got=getattr(self, name))

    def disk_limit(self, used: int) -> int:
        """Return the bytes that the cache may take.

        Args:
            used: bytes it takes now; they count as free, or a full cache would shrink its own limit.
        """
        if self.cache_bytes is not None:
            return self.cache_bytes
        self.cache_folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.cache_folder).free
        return min(_MOST_BYTES, int((free + used) * _SHARE_OF_FREE_DISK))
