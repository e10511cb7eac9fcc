"""Limits of a single request and of all open requests; no torch and no web framework."""

from dataclasses import dataclass

from penstock.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """Limits of requests; all defaults are finite, and generous to honest clients."""

    max_body_bytes: int = 4 * 2**20
    """Maximum bytes of a request's JSON."""
    body_timeout_s: float = 20.0
    """Seconds for a body to arrive, and for the headers before it."""
    max_prompts: int = 128
    """Maximum prompts of one request."""
    max_texts: int = 2048
    """Maximum texts of one request for embeddings, per side if two are compared; `max_prompts` are computed
    at a time."""
    max_output_tokens: int | None = None
    """Maximum tokens of one answer; None: limited by the context only."""
    max_answers: int = 16
    """Maximum `n`, answers per prompt."""
    max_stops: int = 16
    """Maximum stop texts, of at most `max_stop_characters` each."""
    max_stop_characters: int = 256
    max_open: int = 1024
    """Maximum answers running or waiting, over all clients; more get HTTP status 429."""
    deadline_s: float | None = 600.0
    """Seconds for a whole request, waiting included; None: no limit."""

    def __post_init__(self) -> None:
        """Raise ConfigError for limits that would refuse every request."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:  # also refuses NaN
                raise ConfigError(f"{name} must be positive", got=value)
