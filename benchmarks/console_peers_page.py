"""How soon do TensorBoard and Trackio show a first curve? For console.py, on its runs.

First curve: TensorBoard in its time series, from the server's start with a filter for one run, ticked if it
is not, and again in a new page, drawn as SVG, for there is no GPU; Trackio in its dashboard of the project. A
curve is drawn once coloured pixels are in a picture of its chart.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from browsing import PATIENCE_S, curve_ms, memory_mib, wait

from penstock.core import clock

RUN = "0000"
"""The run that is looked at."""
TRACKIO_CHART = ".vega-embed canvas"


def of_peers(browser, folder, arguments):
    """Yield name and figures of the other tools."""
    python, rounds = arguments.peers, arguments.rounds
    for data in ("many", "long"):
        tables, events, home = folder / f"{data}-csv", folder / f"{data}-events", folder / f"{data}-trackio"
        yield f"tensorboard, {data}", tried(tensorboard, browser, python, tables, events, rounds)
        kept = [events / f"{number:04d}" for number in range(arguments.trackio_runs)]
        for run in events.iterdir():
            if run not in kept:
                shutil.rmtree(run)
        yield f"trackio, {data}", tried(trackio, browser, python, events, home, rounds)


def tried(peer, *words):
    """Return the figures of another tool, or why there are none."""
    from playwright.sync_api import Error as BrowserError

    try:
        return peer(*words)
    except (BrowserError, TimeoutError, OSError, subprocess.SubprocessError) as error:
        return {"failed": str(error)}


def script(python, *words):
    """Return the command that does something in the peers' environment."""
    return [python, Path(__file__).with_name("console_peers.py"), *map(str, words)]


@contextmanager
def peer_server(command, address, **environment):
    """Yield the process id of another tool's server, once it answers.

    Raises:
        CalledProcessError: it ended.
    """
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True, **quiet)
    try:
        wait(lambda: answers(address) or process.poll() is not None, f"{command[0]} answers")
        if process.poll() is not None:
            raise subprocess.CalledProcessError(process.returncode, command)
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def free_port():
    """Return a port that nobody listens at: a server left over would answer in another's place."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def answers(address):
    """Return whether a server answers."""
    try:
        urlopen(address, timeout=5).close()
    except OSError:
        return False
    return True


@contextmanager
def tensorboard_server(python, folder):
    """Yield address and process id of a TensorBoard that answers."""
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    command = [str(Path(python).with_name("tensorboard")), "--logdir", str(folder), "--port", str(port),
               "--load_fast", "true"]  # fmt: skip
    with peer_server(command, address) as pid:
        yield address, pid


def tensorboard(browser, python, data, folder, rounds):
    """Time TensorBoard's first curve of the run 0000: from its server's start, and in a new page."""
    subprocess.run(script(python, "tensorboard", data, folder), check=True)
    found = {"first_curve_ms": [], "curve_again_ms": [], "server_mib": []}
    for _ in range(rounds):
        begin = clock.monotonic()
        with tensorboard_server(python, folder) as (address, pid):
            wait(lambda at=address: RUN in runs_with_loss(at), "TensorBoard has read a run")
            curve = partial(curve_ms, browser, time_series(address), "line-chart", choose=tick_first_run)
            curve()
            found["first_curve_ms"].append(1000 * (clock.monotonic() - begin))
            found["curve_again_ms"].append(curve()[0])
            found["server_mib"].append(memory_mib(pid))
    return found


def time_series(address):
    """Return the address of TensorBoard's charts of one run."""
    return f"{address}?pinnedCards=%5B%5D&runFilter=%5E{RUN}%24&forceSVG=true#timeseries"


def tick_first_run(page):
    """Tick the first run of TensorBoard's list, if it is not; of many it shows none by itself."""
    box = page.locator("tb-data-table-content-row mat-checkbox input").first
    box.wait_for(state="attached")
    box.check(force=True)


def runs_with_loss(address):
    """Return the runs whose loss TensorBoard has, as its own page asks for them."""
    tags = json.load(urlopen(f"{address}data/plugin/timeseries/tags", timeout=60))["scalars"]["runTagInfo"]
    return {run for run, found in tags.items() if "loss" in found}


def trackio_home(folder):
    """Return the environment that tells Trackio where its databases are."""
    return {"TRACKIO_DIR": str(folder), "GRADIO_ANALYTICS_ENABLED": "False"}


@contextmanager
def trackio_server(python, folder):
    """Yield the address of the project in a Trackio that answers, and the server's process id."""
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    shown = (
        f"import trackio; trackio.show('bench', open_browser=False, server_port={port}, block_thread=True)"
    )
    with peer_server([python, "-c", shown], address, **trackio_home(folder)) as pid:
        yield f"{address}?project=bench", pid


def trackio(browser, python, data, folder, rounds):
    """Time Trackio's first curve of a project, from its server's start and in a new page.

    Args:
        data: event files.
    """
    subprocess.run(
        script(python, "trackio", data, "bench"),
        check=True, env={**os.environ, **trackio_home(folder)}, stdout=subprocess.DEVNULL, timeout=PATIENCE_S,
    )  # fmt: skip
    found = {"first_curve_ms": [], "curve_again_ms": [], "server_mib": []}
    for _ in range(rounds):
        begin = clock.monotonic()
        with trackio_server(python, folder) as (address, pid):
            curve_ms(browser, address, TRACKIO_CHART)
            found["first_curve_ms"].append(1000 * (clock.monotonic() - begin))
            found["curve_again_ms"].append(curve_ms(browser, address, TRACKIO_CHART)[0])
            found["server_mib"].append(memory_mib(pid))
    return found


def peer_versions(python):
    """Return the versions of those of the other tools that there are."""
    code = (
        "import json; from importlib import metadata, util;"
        "print(json.dumps({n: metadata.version(n) for n in ('tensorboard', 'trackio') if util.find_spec(n)}))"
    )
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)
