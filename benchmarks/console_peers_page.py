"""How soon do TensorBoard and Trackio show a first curve, and a new point? For console.py, on its runs.

First curve: TensorBoard in its time series, from the server's start with a filter for one run, ticked if it
is not, and again in a new page, drawn as SVG, for there is no GPU; and in a new page of its scalars, which
ask for that run alone. Trackio in its dashboard of the project. A curve is drawn once coloured pixels are in
a picture of its chart.

Stream: a process of the peers' environment adds points to one run of these, by the tool's own writer. A delay
is from a point's flush (TensorBoard) or from when it is in the database (Trackio, whose `log` gathers for up
to 0.5 s before) to the drawing that has it: the first new path (SVG) or stroke (canvas) in the chart of the
loss after an answer with that point or a newer one, noted within the page, as it is for the console. Points
that are not drawn DRAWN_WITHIN_S after the last was written are filed as failed. Each tool is at its best,
with a filter for the run and the chart:

- TensorBoard: its data server sleeps one second between two readings (it takes whole seconds). Its scalars,
  for an answer to its time series has all runs: 3 s of 1,000. The page asks for new data every 30 s, the
  least that it accepts; points come spread over that time.
- TensorBoard, pressed: the script presses the page's button for new data, and again as soon as the chart has
  its answer, all along: the least that a reader could see.
- Trackio: its page asks every second, which is fixed.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.request import urlopen

from browsing import BETWEEN_S, PATIENCE_S, curve_ms, memory_mib, new_page, wait

from penstock.core import clock

RUN = "0000"
"""The run that is looked at, and grows; the script for the page knows it too."""
DRAWN_WITHIN_S = 60
TRACKIO_CHART = ".vega-embed canvas"
RELOAD_S = 30
"""Of TensorBoard's page, once its automatic reload is on: the default, and the least that it accepts."""


def of_peers(browser, folder, arguments):
    """Yield name and figures of the other tools."""
    python, rounds, points = arguments.peers, arguments.rounds, arguments.points
    for data in ("many", "long"):
        tables, events, home = folder / f"{data}-csv", folder / f"{data}-events", folder / f"{data}-trackio"
        yield f"tensorboard, {data}", tried(tensorboard, browser, python, tables, events, rounds)
        if data == "many":
            grows = partial(tried, tensorboard_stream, browser, python, tables, events, points)
            yield "tensorboard, stream", grows()
            yield "tensorboard, pressed", grows(is_pressed=True)
        kept = [events / f"{number:04d}" for number in range(arguments.trackio_runs)]
        for run in events.iterdir():
            if run not in kept:
                shutil.rmtree(run)
        yield f"trackio, {data}", tried(trackio, browser, python, events, home, rounds)
        if data == "many":
            yield "trackio, stream", tried(trackio_stream, browser, python, tables, home, points)


def tried(peer, *words, **settings):
    """Return the figures of another tool, or why there are none."""
    from playwright.sync_api import Error as BrowserError

    try:
        return peer(*words, **settings)
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
def tensorboard_server(python, folder, *options):
    """Yield address and process id of a TensorBoard that answers."""
    port = free_port()
    address = f"http://127.0.0.1:{port}/"
    command = [str(Path(python).with_name("tensorboard")), "--logdir", str(folder), "--port", str(port),
               "--load_fast", "true", *options]  # fmt: skip
    with peer_server(command, address) as pid:
        yield address, pid


def tensorboard(browser, python, data, folder, rounds):
    """Time TensorBoard's first curve of the run 0000: from its server's start, and in a new page."""
    subprocess.run(script(python, "tensorboard", data, folder), check=True)
    found = {"first_curve_ms": [], "curve_again_ms": [], "scalars_curve_ms": [], "server_mib": []}
    for _ in range(rounds):
        begin = clock.monotonic()
        with tensorboard_server(python, folder) as (address, pid):
            wait(lambda at=address: RUN in runs_with_loss(at), "TensorBoard has read a run")
            curve = partial(curve_ms, browser, time_series(address), "line-chart", choose=tick_first_run)
            curve()
            found["first_curve_ms"].append(1000 * (clock.monotonic() - begin))
            found["curve_again_ms"].append(curve()[0])
            found["scalars_curve_ms"].append(curve_ms(browser, scalars(address), "vz-line-chart2")[0])
            found["server_mib"].append(memory_mib(pid))
    return found


def tensorboard_stream(browser, python, data, folder, points, *, is_pressed=False):
    """Time the points of a run that grows, then remove them."""
    run, num_runs = folder / RUN, len([*folder.iterdir()])
    before = {*run.iterdir()}
    between_s = BETWEEN_S if is_pressed else RELOAD_S / points
    writer = script(python, "grow-tensorboard", data / f"{RUN}.csv", run, points, between_s)
    try:
        with tensorboard_server(python, folder, "--reload_interval", "1") as (address, _):
            wait(lambda: len(runs_with_loss(address)) == num_runs, "TensorBoard has read all runs")
            settings = None if is_pressed else {"autoReload": True}
            return stream(browser, scalars(address), writer, settings=settings, is_pressed=is_pressed)
    finally:
        for path in {*run.iterdir()} - before:
            path.unlink()


def time_series(address):
    """Return the address of TensorBoard's charts with a filter for one run, drawn from the data of all."""
    return f"{address}?pinnedCards=%5B%5D&runFilter=%5E{RUN}%24&forceSVG=true#timeseries"


def scalars(address):
    """Return the address of TensorBoard's older charts, of one run, the loss first."""
    return f"{address}#scalars&regexInput=%5E{RUN}%24&tagFilter=%5Eloss%24"


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


def trackio_stream(browser, python, data, folder, points):
    """Time the points of a run that grows, of the project that `trackio` has imported."""
    writer = script(python, "grow-trackio", data / f"{RUN}.csv", "bench", points, BETWEEN_S)
    with trackio_server(python, folder) as (address, _):
        view = f"{address}&runs={RUN}&metric_filter=%5Eloss%24"
        return stream(browser, view, writer, **trackio_home(folder))


def stream(browser, address, writer, *, settings=None, is_pressed=False, **environment):
    """Open a page, let another process write points, and return their delays.

    Args:
        writer: command that prints `written STEP UNIX_MS` for each point.
        settings: what TensorBoard's page has stored in this browser; None: nothing.
        is_pressed: press TensorBoard's button for new data, all along.
        environment: of the writer.
    """
    from playwright.sync_api import TimeoutError as Late

    page = new_page(browser, Path(__file__).with_suffix(".js"))
    try:
        if settings is not None:
            stored = json.dumps(json.dumps(settings))
            page.add_init_script(f"localStorage.setItem('_tb_global_settings', {stored})")
        page.goto(address)
        wait(partial(page.evaluate, "window.drawn.length"), "the curve")
        page.wait_for_timeout(1500)
        if is_pressed:
            page.evaluate("window.press()")
        done = subprocess.run(writer, check=True, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, **environment}, timeout=PATIENCE_S)  # fmt: skip
        said = re.findall(r"^written (\d+) ([\d.]+)$", done.stdout, re.MULTILINE)
        written = {int(step): float(at) for step, at in said}
        is_drawn = "step => window.drawn.some(([newest]) => newest >= step)"
        with suppress(Late):
            page.wait_for_function(is_drawn, arg=max(written), timeout=1000 * DRAWN_WITHIN_S, polling=250)
        return delays(written, page.evaluate("window.drawn"))
    finally:
        page.close()


def delays(written, drawn):
    """Return the figures of a stream.

    Args:
        written: step -> Unix ms.
        drawn: (newest step, Unix ms) of each drawing, in order.

    >>> delays({301: 10, 302: 20, 303: 30}, [(300, 5), (302, 25)])
    {'delay_ms': [15, 5], 'failed': '1 of 3 points not drawn within 60 s'}
    """
    at = {step: next((time for newest, time in drawn if newest >= step), None) for step in written}
    shown = [at[step] - time for step, time in written.items() if at[step] is not None]
    found = {"delay_ms": shown} if shown else {}
    if len(shown) < len(written):
        lost = len(written) - len(shown)
        found["failed"] = f"{lost} of {len(written)} points not drawn within {DRAWN_WITHIN_S} s"
    return found


def peer_versions(python):
    """Return the versions of those of the other tools that there are."""
    code = (
        "import json; from importlib import metadata, util;"
        "print(json.dumps({n: metadata.version(n) for n in ('tensorboard', 'trackio') if util.find_spec(n)}))"
    )
    return json.loads(subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout)
