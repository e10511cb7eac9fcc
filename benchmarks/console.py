"""How soon does the console show 1,000 runs, a long one, 1,024 ranks, a new point, beside two other tools?

    python benchmarks/console.py --peers ENV/bin/python --out benchmarks/results

Runs are written as `penstock train` writes them, and opened in Chromium:

- table: from the navigation to the first row, of --runs runs; scrolled to its end and back, the longest task
- a run of --steps steps: from the click in the table to its curve, when it was never read, and again; and
  from the navigation in a new page, as the peers below are timed
- ranks: a heat map of --ranks ranks x --rank-steps records, from the click to its picture, again, and what
  drawing alone takes
- a run that grows, one of --runs: from the line's write to its point on the canvas
- memory of the server, and of the page's JavaScript

With --peers, a Python with tensorboard (its data server, `--load_fast true`), trackio and tbparse, the same
scalars are written by TensorBoard's own writer and given to trackio.import_tf_events. Each shows its first
curve and a run that grows, at its best: console_peers_page.py says how.

Times printed are the least of --rounds, delays the largest; the result has all, and the machine's load.
"""

import argparse
import base64
import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from browsing import BETWEEN_S, curve_ms, heap_mib, memory_mib, new_page, wait
from console_peers_page import of_peers, peer_versions
from results_file import file_result

from penstock.core import clock

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_SANDBOX = "--no-sandbox"
GROWS = "0000"
"""Run that grows while a page looks."""
PARTS = ("table", "long", "ranks", "stream", "peers")
TARGETS = {
    "table_ms": 2000,
    "scroll_longest_task_ms": 50,
    "first_curve_ms": 3000,
    "curve_again_ms": 300,
    "first_heat_map_ms": 500,
    "heat_map_ms": 500,
    "delay_ms": 1000,
}
SHARES = ("data_wait", "forward", "backward", "communication", "optimizer")
PEER_METRICS = ("loss", "grad_norm", "learning_rate", "step_s", "tokens_per_s", "mfu", "hfu", "memory_bytes",
                *(f"{name}_share" for name in SHARES))  # fmt: skip


def records(num_steps, seed):
    """Yield a run's records, some 600 bytes each."""
    generator = np.random.default_rng(seed)
    noise = generator.normal(0, 0.03, num_steps)
    yield {"event": "start", "step": 0, "ranks": 8, "time": "2026-11-01T00:00:00+00:00", "device": "cpu"}
    for step in range(1, num_steps + 1):
        shares = {f"{name}_share": round(0.2 + 0.01 * math.sin(step + i), 6) for i, name in enumerate(SHARES)}
        weights = {"web": 0.7, "code": 0.3}
        yield {
            "step": step,
            "tokens": step * 65536,
            "loss": 2 + 8 / (1 + step / 500) ** 0.5 + noise[step - 1],
            "labels": 65000,
            "grad_norm": 1.0 + abs(noise[step - 1]),
            "learning_rate": 3e-4 * (1 - step / (num_steps + 1)),
            "step_s": 0.5 + noise[step - 1] / 10,
            "tokens_per_s": 131072.0 * (1 + noise[step - 1]),
            "mfu": 0.41,
            "hfu": 0.45,
            **shares,
            "memory_bytes": 41_000_000_000,
            "corpus_tokens": {name: round(step * 65536 * weight) for name, weight in weights.items()},
            "corpus_weights": weights,
            "corpus_shares": weights,
        }


def write_run(folder, num_steps, seed, *, table=None):
    """Write a run's files, and its scalars as CSV for others."""
    folder.mkdir(parents=True)
    found = list(records(num_steps, seed))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
    recipe = {"run": {"steps": num_steps + 100_000, "seed": seed}, "optim": {"learning_rate": 3e-4}}
    (folder / "config.json").write_text(json.dumps(recipe))
    if table is not None:
        table.parent.mkdir(parents=True, exist_ok=True)
        with table.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("step", *PEER_METRICS))
            rows.writerows((record["step"], *(record[name] for name in PEER_METRICS)) for record in found[1:])


def write_ranks(folder, num_ranks, num_records):
    """Write the records of single ranks, as RankRecords does."""
    generator = np.random.default_rng(0)
    with (folder / "ranks.jsonl").open("w") as file:
        hosts = [f"node-{rank // 8:03d}" for rank in range(num_ranks)]
        start = {"step": 0, "ranks": num_ranks, "hosts": hosts, "devices": ["H100"] * num_ranks}
        file.write(json.dumps(start) + "\n")
        for step in range(1, num_records + 1):
            values = generator.normal(1, 0.05, (5, num_ranks)).astype("<f4")
            names = ("own_s", "data_wait_s", "blocked_s", "memory_bytes", "sent_bytes")
            packed = {
                name: base64.b64encode(row.tobytes()).decode()
                for name, row in zip(names, values, strict=True)
            }
            file.write(json.dumps({"step": step, "steps": 1, **packed}) + "\n")


@contextmanager
def console(folder):
    """Yield address and process id of `penstock console`."""
    command = [sys.executable, "-m", "penstock", "console", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield re.search(r"http://\S+?/", process.stdout.readline())[0], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()


def watched(browser):
    """Return a page that counts long tasks, points and pictures."""
    return new_page(browser, Path(__file__).with_name("console_page.js"))


def table(browser, folder, rounds):
    """Time the table of runs, and scroll it."""
    found = {"table_ms": [], "scroll_longest_task_ms": [], "page_mib": [], "server_mib": []}
    for _ in range(rounds):
        with console(folder) as (address, pid):  # each time a server that knows nothing
            page = watched(browser)
            page.goto(address, wait_until="commit")
            wait(partial(page.evaluate, "window.tableAt"), "the table")
            found["table_ms"].append(page.evaluate("window.tableAt"))
            page.wait_for_timeout(500)
            page.evaluate("window.longest = 0")
            page.evaluate("window.scrollTable()")
            found["scroll_longest_task_ms"].append(page.evaluate("window.longest"))
            found["page_mib"].append(heap_mib(page))
            found["server_mib"].append(memory_mib(pid))
            page.close()
    return found


def long_run(browser, folder, rounds):
    """Time the curve of a long run: never read, again, and in a new page."""
    found = {kind: [] for kind in ("first_curve_ms", "curve_again_ms", "new_page_ms", "server_mib")}
    for _ in range(rounds):
        with opened(browser, folder) as (page, view, pid):
            found["first_curve_ms"].append(shown_ms(page, view, "window.drawn.length"))
            page.evaluate("location.hash = '#/'")
            page.locator(".runs .name a").first.wait_for()
            found["curve_again_ms"].append(shown_ms(page, view, "window.drawn.length"))
            address = page.url.partition("#")[0]
            found["new_page_ms"].append(curve_ms(browser, address + view, "#loss canvas")[0])
            found["server_mib"].append(memory_mib(pid))
    return found


def heat_map(browser, folder, rounds):
    """Time the heat map from the click, again, and its drawing alone."""
    found = {"first_heat_map_ms": [], "heat_map_ms": [], "heat_map_drawn_ms": [], "server_mib": []}
    drawn = "document.querySelector('.ranks canvas[aria-label]')"
    for _ in range(rounds):
        with opened(browser, folder) as (page, view, pid):
            for kind in ("first_heat_map_ms", "heat_map_ms"):
                page.evaluate(f"location.hash = '{view}/recipe'")
                page.get_by_label("Search keys and values").wait_for()
                found[kind].append(shown_ms(page, f"{view}/ranks", drawn))
                found["heat_map_drawn_ms"].append(page.evaluate("window.redraw()"))
            found["server_mib"].append(memory_mib(pid))
    return found


@contextmanager
def opened(browser, folder):
    """Yield a page with a console's table, the address of its one run, and the server's process."""
    with console(folder) as (address, pid):
        page = watched(browser)
        page.goto(address)
        page.locator(".runs .name a").first.wait_for()
        yield page, page.locator(".runs .name a").first.get_attribute("href"), pid
        page.close()


def shown_ms(page, view, is_shown):
    """Go to a view of the page; return the ms until something is so and the next picture is due."""
    return page.evaluate(f"window.show({json.dumps(view)}, () => {is_shown})")


def delays(browser, folder, points):
    """Append lines to a run among many, and return the ms from each write to its point on the canvas."""
    path = folder / GROWS / "metrics.jsonl"
    first = json.loads(path.read_text().splitlines()[-1])
    written = {}

    def write():
        for step in range(first["step"] + 1, first["step"] + 1 + points):
            with path.open("a") as file:
                file.write(json.dumps({**first, "step": step, "tokens": step * 65536}) + "\n")
            written[step] = 1000 * clock.unix_seconds()
            clock.sleep(BETWEEN_S)

    with console(folder) as (address, _):
        runs = json.load(urlopen(f"{address}api/runs"))["runs"]
        run = next(run for run in runs if run["name"] == GROWS)
        page = watched(browser)
        page.goto(f"{address}#/run/{run['id']}")
        wait(partial(page.evaluate, "window.drawn.length"), "the curve")
        page.wait_for_timeout(1500)
        writer = threading.Thread(target=write)
        writer.start()
        while writer.is_alive():
            page.wait_for_timeout(100)
        page.wait_for_timeout(1500)
        arrived, drawn = page.evaluate("[window.arrived, window.drawn]")
        page.close()
    at = dict(arrived)
    return [
        min((time for time in drawn if time >= at[step]), default=math.inf) - written[step]
        for step in written
    ]


def write_data(folder, arguments, chosen):
    """Write the runs that the chosen parts need."""
    if {"table", "stream", "peers"} & chosen:
        for number in range(arguments.runs):
            tables = folder / "many-csv" / f"{number:04d}.csv" if arguments.peers else None
            write_run(folder / "many" / f"{number:04d}", arguments.each, number, table=tables)
    if {"long", "peers"} & chosen:
        tables = folder / "long-csv" / "0000.csv" if arguments.peers else None
        write_run(folder / "long" / "run", arguments.steps, 0, table=tables)
    if "ranks" in chosen:
        write_run(folder / "ranks" / "run", 100, 0)
        write_ranks(folder / "ranks" / "run", arguments.ranks, arguments.rank_steps)


def measured(launch, folder, arguments, chosen):
    """Yield name and figures of each part.

    Args:
        launch: opens a browser; given its further options.
    """
    with closing(launch()) as browser:
        yield from of_console(browser, folder, arguments, chosen)
    if "peers" in chosen and arguments.peers:
        with closing(launch()) as browser:
            yield from of_peers(browser, folder, arguments)


def of_console(browser, folder, arguments, chosen):
    """Yield name and figures of each part of the console."""
    rounds = arguments.rounds
    if "table" in chosen:
        yield "console, table", table(browser, folder / "many", rounds)
    if "long" in chosen:
        yield "console, long run", long_run(browser, folder / "long", rounds)
    if "ranks" in chosen:
        yield "console, ranks", heat_map(browser, folder / "ranks", rounds)
    if "stream" in chosen:
        yield "console, stream", {"delay_ms": delays(browser, folder / "many", arguments.points)}


def show(name, found):
    """Print the least of each figure, and what was aimed at; of delays the largest."""
    for figure, values in found.items():
        if not isinstance(values, list):
            print(f"{name:<22}{figure:<28}{values}", flush=True)
            continue
        number = max(values) if figure == "delay_ms" else min(values)
        aim = TARGETS.get(figure) if name.startswith("console") else None
        told = "" if aim is None else f"   aim {aim}: {'kept' if number < aim else 'MISSED'}"
        print(f"{name:<22}{figure:<28}{number:>10.1f}{told}", flush=True)


def main():
    """Measure, print and file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--each", type=int, default=300, help="steps of each of them")
    parser.add_argument("--steps", type=int, default=100_000, help="of the long run")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--rank-steps", type=int, default=10_000, help="records of every rank")
    parser.add_argument("--points", type=int, default=40, help="lines written while the page looks")
    parser.add_argument(
        "--trackio-runs", type=int, default=20, help="of --runs: its import takes a second each"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--peers", help="Python of an environment with tensorboard and trackio")
    parser.add_argument("--out", type=Path, help="folder for the result")
    arguments = parser.parse_args()
    if CHROMIUM is None:
        print("There is no Chromium on this machine.")
        return 0
    from playwright.sync_api import sync_playwright

    settings = {name: value for name, value in vars(arguments).items() if name not in ("out", "peers")}
    result = {"settings": settings, "load_at_start": os.getloadavg(), "rows": {}}
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        write_data(Path(place), arguments, {*arguments.only})

        def launch(*options):
            return playwright.chromium.launch(executable_path=CHROMIUM, args=[NO_SANDBOX, *options])

        for name, found in measured(launch, Path(place), arguments, {*arguments.only}):
            result["rows"][name] = found
            show(name, found)
    result["load_at_end"] = os.getloadavg()
    if arguments.peers:
        result["peers"] = peer_versions(arguments.peers)
    if arguments.out:
        file_result(arguments.out, "console", result, packages=("playwright", "uvicorn", "fastapi"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
