"""Watch and compare runs in a browser while they train; with --control, change them too.

RUNS are folders of runs, or folders that hold them; also addresses of copies in object stores (s3://, gs://,
az://; https:// of one run), which are only read. The console listens on this machine only and keeps no
database: it reads what runs write, and stores columns in the user's cache folder. --host opens it to other
machines and needs --key-file. In a run's folder it writes only requests, and these only with --control.

example:
  penstock console runs/
  penstock console runs/first runs/second --control
  penstock console s3://bucket/runs
  penstock console runs/ --host 0.0.0.0 --key-file keys.txt

exit codes: 0 ended by a signal, 1 failed, 2 wrong usage
"""

import argparse
import math
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from penstock.cli.options import add_fields, options_of
from penstock.core.errors import UsageError
from penstock.core.listen import is_loopback, open_socket
from penstock.storage.address import is_remote

_PACKAGES = ("fastapi", "uvicorn")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    """Options of the console."""

    host: Annotated[str, "HOST"] = "127.0.0.1"
    """Address to listen at."""
    name: Annotated[str, "HOST"] = ""
    """Host name of a proxy with TLS in front, which passes the Host header on."""
    port: int = 8400
    """Port to listen at; 0: a free one."""
    price: Annotated[float | None, "P"] = None
    """Price of a device for an hour. None: the recipe's."""
    control: bool = False
    """Allow requests to running jobs."""
    key_file: Annotated[Path | None, "FILE"] = None
    """One `name key` a line; browsers ask for a key."""

    def __post_init__(self) -> None:
        if not 0 <= (self.price or 0.0) < math.inf:
            raise UsageError(
                "--price must be 0 or more", got=self.price, fix="Give the price of a device-hour."
            )
        if self.name and not _is_host_name(self.name):
            raise UsageError(
                "--name is a host name, without scheme and port",
                got=self.name,
                fix="Give the name of the proxy, such as runs.example.com.",
            )
        if self.key_file is None and (self.name or not is_loopback(self.host)):
            option = f"--name {self.name}" if self.name else f"--host {self.host}"
            raise UsageError(
                f"{option} opens the console to other machines, and there is no key",
                fix="Give --key-file FILE; or leave the option out and use `ssh -L`.",
            )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "runs", nargs="*", metavar="RUNS", help="runs, folders of runs, or their addresses; default: runs/"
    )
    add_fields(parser, ConsoleOptions)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise UsageError(
            f"The console needs packages that are not installed: {', '.join(missing)}",
            fix="Install them with `pip install 'penstock[serve]'`.",
        )
    options = options_of(arguments, ConsoleOptions)
    folders = arguments.runs or ["runs"]
    for folder in folders:
        if not is_remote(folder) and not Path(folder).is_dir():
            raise UsageError(f"{folder} is not a folder", fix="Give runs, or folders that hold runs.")
    from penstock.console.access import ConsoleAccess
    from penstock.console.app import build_app, serve
    from penstock.console.state import ConsoleState
    from penstock.core.api_keys import read_keys

    keys = None if options.key_file is None else read_keys(options.key_file)
    rules = ConsoleAccess(host=options.host, proxy_name=options.name, keys=keys, control=options.control)
    console = ConsoleState(folders, rules, price=options.price or 0.0)
    console.folders.runs()  # an address that cannot be read is told here, not in a browser
    with open_socket(options.host, options.port) as sock:
        host = f"[{options.host}]" if ":" in options.host else options.host
        address = f"http://{host}:{sock.getsockname()[1]}/"
        serve(
            build_app(console),
            sock,
            on_started=lambda: print(f"{'console':<16}{address}    (Ctrl-C ends)", flush=True),
            on_end=console.end,
        )
    console.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads may still wait for an object store


def _is_host_name(text: str) -> bool:
    try:
        return urlsplit(f"//{text}").hostname == text.lower()
    except ValueError:
        return False
