"""Options of the server's process: who may ask, what requests omit, and how it ends; no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of `penstock serve` that are neither the engine's nor limits of requests."""

    name: str = ""
    """Name of the model in requests. Empty: PATH's name."""
    json: bool = False
    """Print one JSON line when ready; no other output."""
    dry_run: bool = False
    """Check the options and print what the engine would be; load no weights, serve nothing."""
    verbose: bool = False
    """Log each request (never its text)."""
    host: str = "127.0.0.1"
    """Address to listen at."""
    port: int = 8000
    """Port to listen at; 0: a free one."""
    api_keys: Path | None = None
    """File with one `name key` a line, keys of 16 characters or more. None: the key in PENSTOCK_API_KEY."""
    insecure: bool = False
    """Accept requests of other machines without a key."""
    cors: tuple[str, ...] = ()
    """Accept requests of web pages of this origin, such as https://chat.example.com."""
    adapter: Annotated[tuple[str, ...], "NAME=FOLDER"] = ()
    """A LoRA adapter, which requests name as their model."""
    api_sampling: bool = False
    """Sampling settings that a request omits take the API's defaults (temperature 1), whatever the model's
    generation_config.json recommends."""
    split_reasoning: bool = False
    """What a model writes between <think> and </think> is a chat's reasoning_content."""
    deadline_s: float = 600.0
    """Maximum time of a request, waiting included; 0: no limit."""
    drain_s: float = 30.0
    """Time that answers have to end after SIGTERM."""
    idle_s: float = 0.0
    """End after so much time without a request; 0: never."""
