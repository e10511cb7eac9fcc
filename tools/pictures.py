"""Draw the pictures of the documentation from real runs, light and dark, into docs/pictures/.

    python -m tools.pictures                  # all of them
    python -m tools.pictures order overlap

- order      which block of a corpus goes to which pool, and which pool each row of a batch comes from, by a
             loader's own sample index
- overlap    computation and network traffic in one step of two emulated hosts, without and with overlap: when
             each block computed, and what the network card had sent by then; needs root and iproute2
- report     the report of the run of docs/tutorials/01-first-model.md
- chat       the chat page on that run

The last two run the tutorial's own commands and need Chromium. All takes some three minutes on two cores.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.cli.streams import explain
from penstock.core import clock
from penstock.data import Loader
from penstock.models.decoder.model import Block
from penstock.netlab.hosts import lab
from penstock.testing.corpora import numbered_corpus
from penstock.train.emulated import Emulation
from penstock.train.resolve.load import build_recipe, recipe_text
from penstock.train.state import TrainState

ROOT = Path(__file__).parent.parent
OUT = ROOT / "docs" / "pictures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours of a picture."""

    paper: str
    ink: str
    muted: str
    rule: str
    series: tuple[str, ...]
    """Told apart by most eyes (Okabe and Ito, 2008)."""


THEMES = {
    "light": Theme(
        paper="#ffffff", ink="#1b1d22", muted="#646a76", rule="#d9dbe0",
        series=("#0072b2", "#d55e00", "#009e73", "#7a7f8a"),
    ),
    "dark": Theme(
        paper="#101216", ink="#e7e9ee", muted="#99a0ae", rule="#2f333d",
        series=("#56b4e9", "#e69f00", "#2fc79a", "#7a7f8a"),
    ),
}  # fmt: skip


class Drawing:
    """An SVG picture in the making; sizes in pixels."""

    def __init__(self, theme: Theme, *, width: int, height: int) -> None:
        self._theme, self._size = theme, (width, height)
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1) -> None:
        """Draw a filled rectangle."""
        faint = "" if opacity == 1 else f' opacity="{opacity:g}"'
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{faint}/>'
        )

    def line(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 1) -> None:
        """Draw a line through points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width}"/>'
        )

    def area(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        """Fill the shape between points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._parts.append(f'<polygon points="{path}" fill="{fill}" opacity=".55"/>')

    def text(
        self, x: float, y: float, text: str, *, size: float = 13, fill: str = "", at: str = "start"
    ) -> None:
        """Write a text whose baseline begins, is centred or ends ("start", "middle", "end") at a point."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill or self._theme.ink}" '
            f'text-anchor="{at}">{escape(text)}</text>'
        )

    def svg(self, title: str) -> str:
        """Return the picture; the title is what it is called for those who cannot see it."""
        width, height = self._size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="system-ui, sans-serif"><title>{escape(title)}</title>'
            f'<rect width="{width}" height="{height}" fill="{self._theme.paper}"/>'
            f"{''.join(self._parts)}</svg>\n"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOrder:
    """The order of one epoch of a corpus, as far as it is drawn."""

    pools: list[list[int]]
    """Blocks of each pool."""
    lanes: int
    """Pools that are read side by side."""
    block_tokens: int
    steps: list[list[int]]
    """Of each step, the pool that each row of the batch comes from."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the corpus."""
        return sum(map(len, self.pools))


def order_of(folder: Path, *, sequence_length: int = 16, rows: int = 12) -> CorpusOrder:
    """Ask a loader over a corpus for its order."""
    loader = Loader({"c": folder}, sequence_length=sequence_length, global_batch_size=rows)
    index = loader._run.sample_index
    order = index.epochs(0, 0, last=0).entries[0].order
    size = order.geometry.block_tokens
    pools = [[start // size for start, _ in order.blocks.of_pool(0, pool)] for pool in range(order.num_pools)]
    steps = []
    for step in range(-(-order.samples_per_epoch // rows)):
        _, addresses = index.addresses(index.locate(loader.samples_of(step)))
        steps.append(addresses.pool.tolist())
    return CorpusOrder(pools=pools, lanes=order.geometry.lanes, block_tokens=size, steps=steps)


def draw_order(order: CorpusOrder, theme: Theme) -> str:
    """Return the picture of an order: the corpus, the first pools, and the rows of some steps."""
    per_row, cell, left = 64, 13, 20
    num_rows = -(-order.num_blocks // per_row)
    drawn = Drawing(
        theme, width=left * 2 + per_row * cell, height=250 + num_rows * (cell + 4) + 34 * order.lanes
    )
    pool_of = {block: pool for pool, blocks in enumerate(order.pools) for block in blocks}

    def color(pool: int) -> tuple[str, float]:
        group, lane = divmod(pool, order.lanes)
        return (
            (theme.series[lane], 1)
            if group == 0
            else (theme.series[lane], 0.35)
            if group == 1
            else (theme.rule, 1)
        )

    y = 26.0
    drawn.text(
        left,
        y,
        f"1  A corpus of {order.num_blocks} blocks, {order.block_tokens:,} tokens each, as it lies on disk",
    )
    y += 12
    for block in range(order.num_blocks):
        row, column = divmod(block, per_row)
        fill, opacity = color(pool_of[block])
        drawn.rect(left + column * cell, y + row * (cell + 4), cell - 2, cell, fill, opacity=opacity)
    y += num_rows * (cell + 4) + 28
    drawn.text(
        left,
        y,
        f"2  A keyed permutation deals the blocks to pools; {order.lanes} pools are read side by side",
    )
    y += 12
    for lane in range(order.lanes):
        blocks = order.pools[lane]
        fill, _ = color(lane)
        drawn.rect(left, y, 46 + len(blocks) * 44, 26, fill, opacity=0.16)
        drawn.text(left + 8, y + 18, f"pool {lane}", size=12, fill=theme.muted)
        for place, block in enumerate(blocks):
            drawn.text(left + 74 + place * 44, y + 18, str(block), size=12, fill=fill, at="middle")
        y += 34
    y += 20
    drawn.text(
        left,
        y,
        "3  In a pool documents are shuffled and packed into rows; a step takes rows from the pools in turn",
    )
    y += 12
    shown = _steps_shown(order)
    width = (per_row * cell) / len(shown)
    for column, step in enumerate(shown):
        x = left + column * width
        if step is None:
            drawn.text(x + width / 2, y + 46, "...", size=16, fill=theme.muted, at="middle")
            continue
        for row, pool in enumerate(order.steps[step]):
            fill, opacity = color(pool)
            drawn.rect(x + 6, y + row * 8, width - 12, 6, fill, opacity=opacity)
        drawn.text(
            x + width / 2,
            y + 8 * len(order.steps[step]) + 14,
            f"step {step + 1}",
            size=11,
            fill=theme.muted,
            at="middle",
        )
    drawn.text(
        left,
        y + 8 * len(order.steps[0]) + 38,
        "Fainter: the pools that are read next, when these are used up. Grey: later pools.",
        size=12,
        fill=theme.muted,
    )
    return drawn.svg("How blocks of a corpus become pools and rows of training steps")


def _steps_shown(order: CorpusOrder) -> list[int | None]:
    """Return the first steps, a gap, and those where the next pools begin."""
    change = next(
        (step for step, pools in enumerate(order.steps) if max(pools) >= order.lanes), len(order.steps) - 1
    )
    return [0, 1, 2, 3, None, change - 1, change, change + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """What one rank did in one step."""

    label: str
    blocks: list[tuple[str, float, float]]
    """What (forward, backward), from and to second."""
    sent: list[tuple[float, int]]
    """Second, bytes that the network card had sent by then."""

    @property
    def seconds(self) -> float:
        """From the first block's begin to the last sample."""
        return self.sent[-1][0]


BLOCKS, PACE_S, RATE = 6, 1.0, "100mbit"
STEPS, DRAWN_STEP = 4, 2


def timeline_of(*, overlap: bool) -> StepTimeline:
    """Train on two emulated hosts with paced blocks, and return what the first rank did in one step."""
    recipe = build_recipe(
        {
            "run": {"dir": "never-written", "steps": 100},
            "model": {
                "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": BLOCKS,
                "num_attention_heads": 4, "vocab_size": 256,
            },
            "data": {
                "corpora": {"c": {"path": "synthetic:tokens=1e6,vocab_size=256"}},
                "sequence_length": 16, "global_batch_size": 2,
            },
            "compute": "float32",
            "ethernet": {"overlap": overlap},
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, lab(hosts=2, rate=RATE) as hosts:
        record = functools.partial(_record, folder=Path(folder))
        emulation = Emulation(hosts=hosts, steps=STEPS, prepare=record)
        emulation.measure(recipe, lambda error: explain(error)[:2], compute_s=PACE_S)
        lines = [json.loads(line) for line in (Path(folder) / "rank-0").read_text().splitlines()]
    return timeline_from(
        lines,
        label="overlapped (ethernet.overlap = true)"
        if overlap
        else "FSDP2 as it comes (ethernet.overlap = false)",
    )


def timeline_from(lines: Sequence[list[Any]], *, label: str) -> StepTimeline:  # Any: a name and numbers
    """Return one step of what a rank wrote down: ["forward", block, begin, end], ["sent", time, bytes].

    >>> lines = [["forward", 0, t, t + 1] for t in (0.0, 10.0, 20.0, 30.0)]
    >>> lines += [["sent", t, 5] for t in range(31)]
    >>> found = timeline_from(lines, label="")
    >>> found.blocks, found.seconds
    ([('forward', 0.0, 1.0)], 10.0)
    """
    begins = sorted(begin for kind, block, begin, *_ in lines if kind == "forward" and block == 0)
    start, stop = begins[DRAWN_STEP], begins[DRAWN_STEP + 1]
    blocks = [
        (kind, begin - start, end - start)
        for kind, _, begin, *rest in lines
        if kind != "sent"
        for end in rest
        if start <= begin < stop
    ]
    sent = [
        (moment - start, count)
        for kind, moment, count, *_ in lines
        if kind == "sent" and start <= moment <= stop
    ]
    return StepTimeline(label=label, blocks=blocks, sent=sent)


def _record(state: TrainState, *, folder: Path) -> None:
    """Let each block take its share of PACE_S, and write down when it does and what the card sends."""
    card = Path("/sys/class/net/eth0/statistics/tx_bytes")
    file = (folder / f"rank-{os.environ['RANK']}").open("w", buffering=1)

    def write(*values: object) -> None:
        file.write(json.dumps(values) + "\n")

    def sample() -> None:
        while True:
            write("sent", clock.monotonic(), int(card.read_text()))
            clock.sleep(0.004)

    threading.Thread(target=sample, daemon=True).start()
    found = [module for module in state.model.modules() if isinstance(module, Block)]
    for number, block in enumerate(found):
        block.forward = _paced(block.forward, number, write)  # type: ignore[method-assign]


def _paced(
    forward: Callable[..., torch.Tensor], number: int, write: Callable[..., None]
) -> Callable[..., torch.Tensor]:
    """Wrap a block's forward: a third of its time there, the rest in its backward pass, asleep."""
    each = PACE_S / BLOCKS

    @functools.wraps(forward)
    def paced(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:  # Any: what a block takes
        begun, backward = clock.monotonic(), [0.0]
        y = forward(
            _on_gradient(x, lambda: _spend("backward", number, backward[0], each * 2 / 3, write)),
            *others,
            **named,
        )
        _spend("forward", number, begun, each / 3, write)
        return _on_gradient(y, lambda: backward.__setitem__(0, clock.monotonic()))

    return paced


def _spend(kind: str, number: int, begun: float, seconds: float, write: Callable[..., None]) -> None:
    clock.sleep(max(0.0, begun + seconds - clock.monotonic()))
    write(kind, number, begun, clock.monotonic())


def _on_gradient(x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
    """Return x; its gradient calls a function on its way."""
    passed: torch.Tensor = _Hook.apply(x, call)  # type: ignore[no-untyped-call]
    return passed


class _Hook(torch.autograd.Function):
    """Calls a function when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:  # Any: torch's context
        ctx.call = call
        return x.clone()  # FSDP2 warns of a module that returns a view

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return gradient, None


def draw_overlap(timelines: Sequence[StepTimeline], theme: Theme) -> str:
    """Return the picture of steps below each other, on one scale of time."""
    left, right, row, gap = 96, 20, 34, 128
    drawn = Drawing(theme, width=860, height=54 + gap * len(timelines) + 30)
    seconds = max(timeline.seconds for timeline in timelines)
    across = (860 - left - right) / seconds
    rate = max(float(mbit.max(initial=0)) for mbit in (_mbit_s(timeline)[1] for timeline in timelines))
    legend = (
        (theme.series[0], "forward"),
        (theme.series[1], "backward"),
        (theme.series[2], "sent by the network card"),
    )
    for place, (fill, name) in enumerate(legend):
        drawn.rect(left + place * 110, 12, 12, 12, fill)
        drawn.text(left + 18 + place * 110, 23, name, size=12, fill=theme.muted)
    for number, timeline in enumerate(timelines):
        y = 54.0 + number * gap
        drawn.text(left, y, f"{timeline.label}: {timeline.seconds:.2f} s a step", size=13)
        drawn.text(left - 10, y + 12 + row / 2 + 4, "compute", size=12, fill=theme.muted, at="end")
        drawn.text(left - 10, y + 20 + row * 1.5 + 4, "network", size=12, fill=theme.muted, at="end")
        for kind, begin, end in timeline.blocks:
            x, width = left + begin * across, max((min(end, seconds) - begin) * across - 1, 0.5)
            drawn.rect(x, y + 12, width, row, theme.series[0] if kind == "forward" else theme.series[1])
        base = y + 20 + 2 * row
        moments, mbit = _mbit_s(timeline)
        tops = [
            (left + t * across, base - row * m / rate)
            for t, m in zip(moments.tolist(), mbit.tolist(), strict=True)
        ]
        drawn.area([(left, base), *tops, (left + timeline.seconds * across, base)], theme.series[2])
        drawn.line([(left, base), (860 - right, base)], theme.rule)
        drawn.line(
            [(left + timeline.seconds * across, y + 6), (left + timeline.seconds * across, base)], theme.ink
        )
    y = 54.0 + gap * len(timelines) - 6
    for tick in np.arange(0, seconds, 0.25).tolist():
        drawn.text(left + tick * across, y, f"{tick:g} s", size=11, fill=theme.muted, at="middle")
    return drawn.svg(
        "Computation and network traffic of one rank in one training step, without and with overlap"
    )


def _mbit_s(timeline: StepTimeline, *, bins: int = 160) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return moments and what was sent around them, in Mbit/s."""
    times, counts = np.array(timeline.sent, dtype=np.float64).T
    edges = np.linspace(times[0], times[-1], bins + 1)
    sent = np.diff(np.interp(edges, times, counts))
    return (edges[1:] + edges[:-1]) / 2, sent * 8e-6 / np.diff(edges)


def first_run(folder: Path) -> Path:
    """Make the corpus and the run of the first tutorial, as it says; return the run's folder."""
    (folder / "first.toml").write_text(recipe_text("first"))
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("asyncio", "email", "http", "importlib", "json", "logging", "unittest")
    words = [
        *(library / name for name in names),
        "--suffix",
        ".py",
        "--train-tokenizer",
        1024,
        "--out",
        "corpus",
    ]
    _penstock(folder, "data", "prepare", *words)
    _penstock(folder, "train", "first.toml")
    return folder / "runs" / "first"


def _penstock(folder: Path, *words: object) -> None:
    subprocess.run([sys.executable, "-m", "penstock", *map(str, words)], cwd=folder, check=True)


@contextmanager
def browser_page(theme: str, *, width: int, height: int) -> Iterator[Any]:  # Any: Playwright's page
    """Open a page in Chromium that prefers light or dark colours."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        size: Any = {"width": width, "height": height}
        scheme: Any = theme
        yield browser.new_page(viewport=size, color_scheme=scheme)
        browser.close()


def shoot_report(run: Path, out: Path) -> None:
    """Draw the report of a run and take pictures of it."""
    _penstock(run.parent.parent, "report", run)
    for theme in THEMES:
        with browser_page(theme, width=1000, height=940) as page:
            page.goto((run / "report.html").resolve().as_uri())
            page.locator("#loss canvas").wait_for()
            page.screenshot(path=out / f"report-{theme}.png")


def shoot_chat(run: Path, out: Path) -> None:
    """Serve a run, ask something on its chat page, and take pictures of that."""
    command = [sys.executable, "-m", "penstock", "serve", str(run), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            for theme in THEMES:
                with browser_page(theme, width=900, height=720) as page:
                    page.goto(url)
                    page.get_by_role("button", name="Settings").click()
                    page.get_by_label("Longest answer, in tokens").fill("40")
                    page.get_by_role("button", name="Settings").click()
                    for question in ("What is a socket?", "And a thread?"):
                        page.get_by_label("Message").fill(question)
                        page.get_by_label("Message").press("Enter")
                        page.get_by_role("button", name="Send").wait_for()
                    page.screenshot(path=out / f"chat-{theme}.png")
        finally:
            server.terminate()


def write_svg(name: str, draw: Callable[[Theme], str], out: Path) -> None:
    """Write a picture in every theme."""
    for theme, colors in THEMES.items():
        (out / f"{name}-{theme}.svg").write_text(draw(colors))


def main() -> None:
    """Draw what is asked for."""
    names = ("order", "overlap", "report", "chat")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", choices=[[], *names], metavar="NAME", help=f"of {', '.join(names)}; all"
    )
    asked = parser.parse_args().names or names
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        if "order" in asked:
            order = order_of(numbered_corpus(Path(folder) / "c", [256] * 192))
            write_svg("order", functools.partial(draw_order, order), OUT)
        if "overlap" in asked:
            timelines = [timeline_of(overlap=False), timeline_of(overlap=True)]
            write_svg("overlap", functools.partial(draw_overlap, timelines), OUT)
        if {"report", "chat"} & set(asked):
            run = first_run(Path(folder))
            if "report" in asked:
                shoot_report(run, OUT)
            if "chat" in asked:
                shoot_chat(run, OUT)


if __name__ == "__main__":
    main()
