"""What the parts measure with: a device's time, memory and roofline; attempts that cost no other row.

Graphs, events between them and the profiler's activity are of NVIDIA's GPUs; elsewhere calls are timed by the
host's clock.
"""

import gc
import os
import statistics
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from gpu_parts.child import POISONED
from gpu_parts.part import Part
from penstock.core import clock
from penstock.devices import accelerator

T = TypeVar("T")

GIB = 2**30
_LAST_FRAMES = 3
_MAX_NAME, _MAX_KERNELS = 100, 20
_MIN_S = 2.0
_MAX_REASON = 1200  # characters of a failure that are filed


def attempt(
    part: Part, name: str, work: Callable[[], T], *, needs_s: float = 0.0, is_optional: bool = False
) -> T | None:
    """Return what `work` returns; None, and a row that says why, if it cannot be done or fails.

    Args:
        name: of the row that says so.
        needs_s: seconds that it takes; skipped where fewer are left.
        is_optional: another tool's work, which is skipped where it fails.
    """
    if part.left_s() < needs_s:
        part.skipped(name, f"{max(part.left_s(), 0):.0f} s of the part were left, and it takes {needs_s:.0f}")
        return None
    try:
        return work()
    except torch.OutOfMemoryError as error:
        part.skipped(name, f"not enough memory: {_first_line(error)}")
    except Exception as error:  # whatever a driver, a compiler or a peer may raise: the other rows go on
        (part.skipped if is_optional else part.failed)(name, reason_of(error))
    if not _computes(part.device):
        os._exit(POISONED)
    free(part.device)
    return None


def run_cases(part: Part, works: Mapping[str, Callable[[], Any]]) -> None:
    """Run the cases of a part in their order: a case that fails or has no time costs its own rows.

    A failure that leaves the GPU unusable, as an illegal access does, ends the process: the kit goes on with
    the later cases in another.
    """
    for name in part.cases:
        with part.case(name):
            if part.left_s() < _MIN_S:
                part.cut("was not reached: the time was over")
                continue
            attempt(part, name, works[name])
        if not _computes(part.device):
            os._exit(POISONED)
    part.done()


def canary(part: Part, work: Callable[[Part], Any]) -> None:
    """Run the whole path of a part in tiny shapes, to see what breaks it before time is spent on it.

    Args:
        work: is given a part whose rows are thrown away; those that failed are failed rows of the real one.
    """
    with tempfile.TemporaryDirectory() as folder:
        tried = Part(part.name, part.device, True, part.left_s(), Path(folder) / part.path.name)
        work(tried)
        for row in tried.rows:
            if row.status == "failed":
                part.failed(f"canary, {row.name}", row.why)


def _computes(device: torch.device) -> bool:
    try:
        accelerator.wait(device)
    except RuntimeError:
        return False
    return True


def set_up(device: torch.device, *, compiles: bool = True) -> None:
    """Prepare the process: no warnings; a CPU computes on one thread, and no GPU is used beside it.

    Args:
        compiles: False: on a CPU `torch.compile` does nothing, because its C++ compiler takes longer than all
            the rest.
    """
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    if device.type == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what chooses a device by itself would take one
        torch.set_num_threads(1)
        if not compiles:
            torch.compiler.set_stance("force_eager")


def reason_of(error: BaseException) -> str:
    """Return an error's text, with the places it went through last."""
    frames = traceback.extract_tb(error.__traceback__)[-_LAST_FRAMES:]
    places = "; ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {str(error)[:_MAX_REASON]} (at {places})"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0][:300]


def free(device: torch.device) -> None:
    """Give back the memory of what nobody refers to any more."""
    gc.collect()
    if accelerator.is_accelerator(device):
        accelerator.free_cache()


def free_bytes(device: torch.device) -> int | None:
    """Return the device's free memory; None on a CPU."""
    return accelerator.free_and_total_bytes(device)[0] if accelerator.is_accelerator(device) else None


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on the device; 0 on a CPU."""
    return torch.accelerator.memory_allocated(device) if accelerator.is_accelerator(device) else 0


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes of tensors since `reset_peak`; 0 on a CPU."""
    return accelerator.peak_bytes(device) if accelerator.is_accelerator(device) else 0


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far; what is cached stays, so that steps need not ask for it again."""
    if accelerator.is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)


class Timed(NamedTuple):
    """Time of a call."""

    seconds: float
    is_graph: bool
    """True if calls were replayed as a CUDA graph; False: Python's time is in it."""


def seconds_of(device: torch.device, calls: Sequence[Callable[[], Any]], *, for_s: float) -> float:
    """Return the device's seconds for one call; see `timed`."""
    return timed(device, calls, for_s=for_s).seconds


def timed(
    device: torch.device, calls: Sequence[Callable[[], Any]], *, for_s: float, as_graph: bool = True
) -> Timed:
    """Return the device's time for one call, the median over rounds of all calls.

    Args:
        calls: the same work on different memory, so much together that no cache holds it.
        for_s: how long to measure.
        as_graph: replay the calls as a CUDA graph where the device can, so that the time is the kernels' and
            not Python's.
    """
    for call in calls:
        call()
    accelerator.wait(device)
    replay = _graph_of(calls) if as_graph and device.type == "cuda" else None

    def run() -> None:
        if replay is not None:
            replay()
            return
        for call in calls:
            call()

    run()
    times: list[float] = []
    began = clock.monotonic()
    while len(times) < 3 or clock.monotonic() - began < for_s:
        times.append(_time(device, run))
    return Timed(statistics.median(times) / len(calls), replay is not None)


def _graph_of(calls: Sequence[Callable[[], Any]]) -> Callable[[], None] | None:
    """Return the replay of calls; None if they cannot be captured (they wait for the device, say)."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:  # of whatever kernel: it is timed without a graph then
        torch.cuda.synchronize()
        return None
    return graph.replay


def _time(device: torch.device, run: Callable[[], None]) -> float:
    if device.type != "cuda":
        start = clock.monotonic()
        run()
        accelerator.wait(device)
        return max(clock.monotonic() - start, 1e-9)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    return max(first.elapsed_time(last) / 1000, 1e-9)


def matrix_flops(device: torch.device, dtype: torch.dtype, *, is_tiny: bool) -> float:
    """Return FLOP/s of large square products of normal numbers, in bfloat16 or a float8 type.

    The best of two sizes, each for a third of a second: long enough that the clock is the one that the
    power limit allows. Numbers all alike would draw less power and seem faster.
    """
    best = 0.0
    for size in (64,) if is_tiny else (4096, 8192):
        a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        if dtype.itemsize == 1:
            one = torch.ones((), device=device)
            a, b = a.to(dtype), b.to(dtype).T  # the second by columns, as the instruction wants it

            def product(a=a, b=b, one=one):
                return torch._scaled_mm(
                    a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
                )
        else:

            def product(a=a, b=b):
                return a @ b

        seconds = seconds_of(device, [product], for_s=0.01 if is_tiny else 0.35)
        best = max(best, 2 * size**3 / seconds)
    return best


def memory_bytes_s(device: torch.device, *, is_tiny: bool) -> dict[str, float]:
    """Return bytes a second that the memory gives: `read` (a sum of numbers) and `copy` (both directions)."""
    size = 2**16 if is_tiny else 2 * GIB
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    for_s = 0.01 if is_tiny else 0.3
    read = size / seconds_of(device, [source.sum], for_s=for_s)
    copy = 2 * size / seconds_of(device, [lambda: target.copy_(source)], for_s=for_s)
    return {"read": read, "copy": copy}


def host_trace(
    device: torch.device, work: Callable[[], Any], path: Path
) -> tuple[float, dict[str, dict[str, float]]]:
    """Return what the host took for some work, in ms, and what it did longest, itself: name -> `ms`, `count`.

    Args:
        path: of the trace, for chrome://tracing or Perfetto, packed by gzip where it ends with .gz.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    accelerator.wait(device)
    with torch.profiler.profile(activities=activities) as seen:
        began = clock.monotonic()
        work()
        taken_s = clock.monotonic() - began
        accelerator.wait(device)
    seen.export_chrome_trace(str(path))
    events = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)[:_MAX_KERNELS]
    longest = {
        event.key[:_MAX_NAME]: {"ms": event.self_cpu_time_total / 1e3, "count": event.count}
        for event in events
    }
    return 1e3 * taken_s, longest


class Kernel(NamedTuple):
    """What a kernel took in all its launches."""

    seconds: float
    count: int


def profiled(device: torch.device, work: Callable[[], Any]) -> tuple[float, dict[str, Kernel]]:
    """Return the seconds that a device computes while `work` runs, and its kernels, the longest first.

    What the host does is not recorded, which would slow it. On a CPU kernels are torch's operators.
    """
    is_gpu = device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if is_gpu else torch.profiler.ProfilerActivity.CPU
    accelerator.wait(device)
    with torch.profiler.profile(activities=[activity]) as seen:
        work()
        accelerator.wait(device)
    kind = torch.autograd.DeviceType.CUDA if is_gpu else torch.autograd.DeviceType.CPU
    spans, longest = [], dict[str, Kernel]()
    for event in seen.events() or []:
        if event.device_type == kind and not getattr(event, "is_user_annotation", False):
            start, end = event.time_range.start / 1e6, event.time_range.end / 1e6  # of microseconds
            spans.append((start, end))
            name = event.name[:_MAX_NAME]
            seconds, count = longest.get(name, Kernel(0.0, 0))
            longest[name] = Kernel(seconds + end - start, count + 1)
    return busy_seconds(spans), dict(sorted(longest.items(), key=lambda item: -item[1].seconds))


def per_step(kernels: Mapping[str, Kernel], steps: int) -> dict[str, dict[str, float]]:
    """Return what rows say of the first kernels: `kernels_ms` and `kernels_count` of one of so many steps.

    >>> per_step({"gemm": Kernel(0.004, 6)}, 2)
    {'kernels_ms': {'gemm': 2.0}, 'kernels_count': {'gemm': 3.0}}
    """
    first = [*kernels.items()][:_MAX_KERNELS]
    return {
        "kernels_ms": {name: 1e3 * kernel.seconds / steps for name, kernel in first},
        "kernels_count": {name: kernel.count / steps for name, kernel in first},
    }


def busy_seconds(spans: Sequence[tuple[float, float]]) -> float:
    """Return how long at least one of some spans (start, end) lasts; in the unit of the spans.

    >>> busy_seconds([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def in_turns(
    settings: dict[str, Callable[[], T]], *, rounds: int, left_s: Callable[[], float]
) -> dict[str, list[T]]:
    """Return what each setting gave, round by round; fewer rounds, but one, where the time does not last.

    Args:
        left_s: seconds that may still be spent.
    """
    found: dict[str, list[T]] = {name: [] for name in settings}
    for _, (name, work) in zip(range(rounds * len(settings)), cycle(settings.items()), strict=False):
        if left_s() <= 0 and all(found.values()):
            break
        found[name].append(work())
    return found
