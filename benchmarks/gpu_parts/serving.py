"""Serving figures of one GPU: a stream alone beside the memory's roofline, prompts, many requests, host time.

Models of random numbers are made on the device, and served by the engine that `penstock serve` runs: blocks
compiled, steps of decoding replayed as CUDA graphs. In bfloat16 they are also measured without programs, and
without either (eager). On a CPU nothing is compiled. The roofline of a stream alone is the bytes of matrices
that a token reads over the bytes a second that a sum of 2 GiB reads in the same run. Beside it: transformers'
continuous batching on the same shapes and requests, and vLLM where it is installed.
"""

import gc
import importlib.util
import json
import logging
import sys
import tempfile
from functools import cached_property, partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src"), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from serve_figures import figures  # noqa: E402
from serve_load import many, one  # noqa: E402
from serve_penstock import Penstock  # noqa: E402
from serve_worker import drive  # noqa: E402

from gpu_parts.instruments import (  # noqa: E402
    attempt,
    canary,
    free,
    host_trace,
    matrix_flops,
    memory_bytes_s,
    per_step,
    profiled,
    run_cases,
    set_up,
)
from gpu_parts.machine import is_null_gpu  # noqa: E402
from gpu_parts.part import open_part  # noqa: E402
from penstock.core import clock  # noqa: E402
from penstock.devices import accelerator  # noqa: E402
from penstock.devices.figures import device_named  # noqa: E402
from penstock.engine.assemble import engine_of  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.request import Request  # noqa: E402
from penstock.engine.sampling_params import GREEDY, Sampling  # noqa: E402
from penstock.models import FAMILIES  # noqa: E402
from penstock.models.decoder.config import DecoderConfig  # noqa: E402
from penstock.models.family.config_json import config_json  # noqa: E402
from penstock.models.presets import expanded  # noqa: E402
from penstock.nn.linear.float8 import RECIPES, has_native  # noqa: E402
from penstock.nn.unfilled import unfilled  # noqa: E402

PRESETS = {"1b": "llama3.2-1b", "8b": "llama3.1-8b"}
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
CONTEXT, TINY_CONTEXT = 4096, 256
CACHE_GIB, TINY_CACHE_GIB = 24.0, 0.05
ROOFLINE_TARGETS = {"1b": 55.0}
ALONE_TARGETS_MS = {"H100-80GB": 6.5, "H200": 4.6}
"""Of the 8B shape in bfloat16, by the device: 75 and 73% of its memory's roofline."""
PROMPTS_TARGET, REQUESTS_TARGET = 70.0, 2300.0
IDLE_TARGET_MS, PEER_TARGET = 0.4, 1.0
WEIGHTS = {"bfloat16": "stored", "int8": "int8", "int4": "int4", "float8": "float8"}
EAGER, GRAPHS, COMPILED = "eager", "graphs", "compiled and graphs"
NUM_PROFILED, NUM_TRACED = 16, 3  # steps
DRAWS = ("_draw", "_largest")  # kernels of which a step launches one


class Driven(Penstock):
    """An engine that is there already, as `serve_worker.drive` steps it."""

    def __init__(self, engine):
        self._engine = engine
        self._index = {}
        self.sampling = GREEDY
        """Of the requests to come."""

    def add(self, index, prompt, max_tokens):
        """Queue a request."""
        request = Request(prompt=tuple(prompt), max_tokens=max_tokens, sampling=self.sampling)
        self._index[self._engine.add(request)] = index

    def step(self):
        """Return the indices that got a token.

        Raises:
            RuntimeError: the step failed; the engine says why.
        """
        pieces = self._engine.step()
        if failed := [piece.error for piece in pieces if piece.error is not None]:
            raise RuntimeError(failed[0])
        return [self._index[piece.request_id] for piece in pieces for _ in piece.token_ids]

    def clear(self):
        """End all requests."""
        for request_id in self._index:
            self._engine.cancel(request_id)
        self._engine.step()


def shape_of(name, *, is_tiny, layers=None):
    """Return the config of a shape, with another number of layers if one is given."""
    values = TINY if is_tiny else expanded({"preset": PRESETS[name]})
    if layers is not None:
        values = {**values, "num_hidden_layers": layers}
    values = {**values, "max_position_embeddings": TINY_CONTEXT if is_tiny else CONTEXT}
    return DecoderConfig(**{key: value for key, value in values.items() if key != "rope_scaling"})


def random_model(shape, device):
    """Return a model of random bfloat16 numbers on a device."""
    with unfilled():
        model = FAMILIES[shape.model_type](shape)
    model = model.to(torch.bfloat16).to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02) if parameter.ndim > 1 else parameter.fill_(1.0)
    return model.eval()


def record_graphs(engine, most, *, is_compiled=False):
    """Have steps of decoding replayed as graphs, for up to `most` sequences; return the sizes that are.

    Args:
        is_compiled: compile the blocks before; on a CPU, which has no graphs, they run one by one.
    """
    runner, capacity = engine.runner, engine.capacity
    has_graphs = accelerator.kind_of(runner.cache.device).has_graphs
    ready = []
    if is_compiled or not has_graphs:
        compiled = runner.compile([1], has_any=True, backend="inductor" if has_graphs else "eager")
        compiled.compile_all()
        ready = sorted(compiled.ready)
    if has_graphs:
        width = -(-capacity.context // capacity.block_size)
        ready = runner.record(max_sequences=most, max_blocks=width)
    return ready


def sheet_name(device):
    """Return the planner's name of a device; "" if it has no data sheet."""
    if not accelerator.is_accelerator(device):
        return ""
    _, total = accelerator.free_and_total_bytes(device)
    known = device_named(accelerator.name_of(device), memory_gib=total / 2**30)
    return "" if known is None else known.name


def bytes_per_token(model):
    """Return the bytes of all that a token's step reads of a prepared model: not the embedding's table."""
    parts = (model.layers, model.norm, model.unembed)
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def prompt_flops(shape, length):
    """Return the multiplications and additions of a prompt: matrices, causal attention, the last logits."""
    in_blocks, outside = shape.parameters_of(shape.layers), shape.vocab_size * shape.hidden_size
    seen = [length if window is None else min(length, window) for window in shape.windows]
    pairs = sum(keys * (length - keys / 2) for keys in seen)
    width = shape.num_attention_heads * shape.size_of_head
    return 2 * length * in_blocks + 4 * pairs * width + 2 * outside


class Warnings(logging.Handler):
    """Keeps what is warned of."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        """Keep a message."""
        self.said.append(record.getMessage())


class Serving:
    """The rows of this part."""

    def __init__(self, part, folder):
        self.part, self.folder = part, folder
        self.device, self.is_tiny = part.device, part.is_tiny
        self.at_once = (4, 8) if self.is_tiny else (64, 256)
        self.device_name = sheet_name(self.device)
        self._warnings = Warnings()
        logging.getLogger("penstock.engine.model_runner").addHandler(self._warnings)
        self._best = {}  # by shape: tokens/s of the first number of requests, bfloat16

    @cached_property
    def read_bytes_s(self):
        """Bytes a second that the memory gives to a sum; filed when it is first asked for."""
        found = memory_bytes_s(self.device, is_tiny=self.is_tiny)
        for name, speed in found.items():
            self.part.measured(f"memory, {name}", speed / 1e12, "TB/s")
        return found["read"]

    @cached_property
    def flops(self):
        """FLOP/s that products of matrices reach; filed when they are first asked for."""
        flops = matrix_flops(self.device, torch.bfloat16, is_tiny=self.is_tiny)
        self.part.measured("matrix products, bfloat16", flops / 1e12, "TFLOP/s")
        return flops

    def serve(self, shape_name, weights, modes):
        """Measure one shape with one kind of weights, in some modes."""
        name = f"serve {shape_name} {weights}"
        if weights == "float8" and not has_native(RECIPES["float8_rowwise"], self.device.type):
            self.part.skipped(name, "the device has no float8 instructions")
            return
        engine = attempt(self.part, name, partial(self._open, shape_name, weights), needs_s=10.0)
        if engine is None:
            return
        for mode in modes:
            self._measure(f"{name}, {mode}", shape_name, weights, mode, engine)
        engine.close()
        del engine
        torch.compiler.reset()  # programs may hold what they were made for
        free(self.device)

    def _open(self, shape_name, weights):
        shape = shape_of(shape_name, is_tiny=self.is_tiny)
        config = EngineConfig(
            prefix_caching=False,
            weights=WEIGHTS[weights],
            compile="off",
            kernels="reference" if is_null_gpu() else "auto",
            max_sequences=max(self.at_once),
            max_context=TINY_CONTEXT if self.is_tiny else CONTEXT,
            cache_gib=TINY_CACHE_GIB if self.is_tiny else CACHE_GIB,
        )
        return engine_of(random_model(shape, self.device), config)

    def _measure(self, label, shape_name, weights, mode, engine):
        """File the rows of one mode; an engine's modes come in the order eager, graphs, compiled."""
        if mode != EAGER:
            began = clock.monotonic()
            ready = attempt(
                self.part,
                f"{label}: opened",
                partial(self._compile, engine, mode, max(self._counts(weights, mode))),
                needs_s=25.0 if mode == COMPILED else 10.0,
            )
            if ready is None:
                return
            self.part.measured(f"{label}: opened", clock.monotonic() - began, "s", programs=ready)
        driven = Driven(engine)
        attempt(
            self.part,
            f"{label}, alone: ms/token",
            partial(self._alone, label, shape_name, weights, mode, engine, driven),
            needs_s=3.0,
        )
        if mode == COMPILED and weights == "bfloat16":
            attempt(
                self.part,
                f"{label}, alone, top-p: ms/token",
                partial(self._top_p, label, shape_name, driven),
                needs_s=3.0,
            )
        for count in self._counts(weights, mode):
            attempt(
                self.part,
                f"{label}, {count} requests: tokens/s",
                partial(self._many, label, shape_name, weights, driven, count),
                needs_s=6.0,
            )
            if weights == "bfloat16":
                attempt(
                    self.part,
                    f"{label}, {count} requests: ms/step",
                    partial(self._full_steps, label, shape_name, driven, count),
                    needs_s=3.0,
                )
        if mode == COMPILED and weights == "bfloat16":
            attempt(
                self.part,
                f"{label}, prompts: tokens/s",
                partial(self._prompts, label, shape_name, driven),
                needs_s=3.0,
            )

    def _counts(self, weights, mode):
        """Return the numbers of requests at once that are measured."""
        return self.at_once if weights == "bfloat16" and mode == COMPILED else self.at_once[:1]

    def _compile(self, engine, mode, most):
        """Have steps of decoding replayed, compiled before or not; return the sizes that are."""
        self._warnings.said.clear()
        is_compiled = mode == COMPILED and self.device.type == "cuda"
        ready = record_graphs(engine, most, is_compiled=is_compiled)
        if not ready or self._warnings.said:
            raise RuntimeError(f"compiled {ready}; {'; '.join(self._warnings.said)}")
        return ready

    def _round(self, driven, requests):
        """Return what `serve_figures.figures` makes of one round."""
        began, cpu = clock.monotonic(), clock.cpu_seconds()
        try:
            stamps, tokens = drive(driven, requests)
        except Exception:
            if isinstance(driven, Driven):
                driven.clear()
            raise
        return {
            "stamps": stamps, "tokens": tokens, "wall_s": clock.monotonic() - began,
            "cpu_s": clock.cpu_seconds() - cpu,
        }  # fmt: skip

    def _requests(self, shape_name, count):
        vocabulary = shape_of(shape_name, is_tiny=self.is_tiny).vocab_size
        return many(count, vocabulary=vocabulary, seed=count, scale=0.05 if self.is_tiny else 1.0)

    def _alone(self, label, shape_name, weights, mode, engine, driven):
        part, shape = self.part, shape_of(shape_name, is_tiny=self.is_tiny)
        prompt, answer = (4, 4) if self.is_tiny else (32, 128)
        requests = one(prompt, answer, vocabulary=shape.vocab_size, seed=1)
        self._round(driven, requests)  # kernels that are compiled when they are first called; graphs
        rounds = [figures("single", requests, self._round(driven, requests)) for _ in range(2)]
        ms = min(found["ms_per_token"] for found in rounds)
        read = bytes_per_token(engine.runner.model)
        roofline_ms = 1e3 * read / self.read_bytes_s
        is_held = weights == "bfloat16" and mode != EAGER
        target = ALONE_TARGETS_MS.get(self.device_name) if is_held and shape_name == "8b" else None
        part.measured(
            f"{label}, alone: ms/token", ms, "ms", at_most=target, roofline_ms=roofline_ms, bytes=read
        )
        part.measured(
            f"{label}, alone: share of the memory's roofline",
            100 * roofline_ms / ms,
            "%",
            at_least=ROOFLINE_TARGETS.get(shape_name) if is_held else None,
        )
        driven.add(0, requests[0]["prompt"], 4 if self.is_tiny else NUM_PROFILED)
        busy_ms, kernels = self._profiled(driven)
        part.measured(
            f"{label}, alone: device idle in a step",
            ms - busy_ms,
            "ms",
            at_most=IDLE_TARGET_MS if is_held else None,
            busy_ms=busy_ms,
            **kernels,
        )
        if is_held:
            self._trace(label, driven, requests)

    def _profiled(self, driven):
        """Step to the end; return (ms a step that the device computes, the rows' words on its kernels).

        The engine launches a step before it reads the one before, so the device runs fewer steps in this time
        than the host takes: as many as there are draws.
        """
        for _ in range(2):
            driven.step()
        steps = 0

        def rest():
            nonlocal steps
            while driven.has_work:
                driven.step()
                steps += 1

        busy_s, kernels = profiled(self.device, rest)
        steps = sum(kernels[name].count for name in DRAWS if name in kernels) or steps
        return 1e3 * busy_s / steps, per_step(kernels, steps)

    def _trace(self, label, driven, requests):
        """File what the host does in three steps, and keep their trace beside the rows."""
        driven.add(0, requests[0]["prompt"], 4 + NUM_TRACED)
        for _ in range(3):
            driven.step()
        path = self.part.path.with_name(f"{label.replace(' ', '-').replace(',', '')}.trace.json.gz")
        host_ms, longest = host_trace(self.device, lambda: [driven.step() for _ in range(NUM_TRACED)], path)
        driven.clear()
        self.part.measured(
            f"{label}, alone: host time of a step, traced", host_ms / NUM_TRACED, "ms", longest=longest
        )

    def _top_p(self, label, shape_name, driven):
        """Draws of the likeliest 90%, one request alone."""
        shape = shape_of(shape_name, is_tiny=self.is_tiny)
        prompt, answer = (4, 4) if self.is_tiny else (32, 64)
        requests = one(prompt, answer, vocabulary=shape.vocab_size, seed=3)
        driven.sampling = Sampling(temperature=0.8, top_p=0.9)
        try:
            self._round(driven, requests)
            ms = figures("single", requests, self._round(driven, requests))["ms_per_token"]
        finally:
            driven.sampling = GREEDY
        self.part.measured(f"{label}, alone, top-p: ms/token", ms, "ms")

    def _full_steps(self, label, shape_name, driven, count):
        """Steps in which all of some requests decode: what a profile of them explains."""
        shape = shape_of(shape_name, is_tiny=self.is_tiny)
        answer = 8 if self.is_tiny else 2 * NUM_PROFILED + 8
        for index in range(count):
            (wanted,) = one(32, answer, vocabulary=shape.vocab_size, seed=index)
            driven.add(index, wanted["prompt"], answer)
        decoding = set()
        while len(decoding) < count:
            decoding.update(driven.step())
        began, steps = clock.monotonic(), 2 if self.is_tiny else NUM_PROFILED
        for _ in range(steps):
            driven.step()
        step_ms = 1e3 * (clock.monotonic() - began) / steps
        busy_ms, kernels = self._profiled(driven)
        self.part.measured(
            f"{label}, {count} requests: ms/step",
            step_ms,
            "ms",
            busy_ms=busy_ms,
            idle_ms=step_ms - busy_ms,
            **kernels,
        )

    def _prompts(self, label, shape_name, driven):
        shape = shape_of(shape_name, is_tiny=self.is_tiny)
        length = 64 if self.is_tiny else 2048
        requests = one(length, 1, vocabulary=shape.vocab_size, seed=2)
        self._round(driven, requests)
        rounds = [figures("prefill", requests, self._round(driven, requests)) for _ in range(3)]
        speed = max(found["prompt_tokens_per_s"] for found in rounds)
        self.part.measured(f"{label}, prompts: tokens/s", speed, "tokens/s")
        share = prompt_flops(shape, length) * speed / length / self.flops
        self.part.measured(
            f"{label}, prompts: share of the measured peak", 100 * share, "%",
            at_least=PROMPTS_TARGET if shape_name == "8b" else None,
        )  # fmt: skip

    def _many(self, label, shape_name, weights, driven, count):
        requests = self._requests(shape_name, count)
        self._round(driven, requests)  # the first round, with kernels that are compiled when first called
        found = figures("at once", requests, self._round(driven, requests))
        is_held = (shape_name, weights, count) == ("8b", "bfloat16", 64)
        self.part.measured(
            f"{label}, {count} requests: tokens/s", found["tokens_per_s"], "tokens/s",
            at_least=REQUESTS_TARGET if is_held else None,
        )  # fmt: skip
        waits = {"ttft": "first token", "between": "between tokens"}
        for key, words in waits.items():
            self.part.measured(
                f"{label}, {count} requests: {words}, p99",
                found[f"{key}_p99_ms"],
                "ms",
                p50=found[f"{key}_p50_ms"],
            )
        if weights == "bfloat16" and count == self.at_once[0]:
            self._best[shape_name] = max(self._best.get(shape_name, 0.0), found["tokens_per_s"])

    def transformers(self, shape_name):
        """Transformers' continuous batching, by its own defaults for this device."""
        count = self.at_once[0]
        name = f"serve {shape_name} bfloat16, transformers' continuous batching, {count} requests: tokens/s"
        found = attempt(self.part, name, partial(self._transformers, shape_name, count), needs_s=25.0)
        free(self.device)
        if found is None:
            return
        self.part.measured(name, found["tokens_per_s"], "tokens/s", **found)
        if shape_name in self._best:
            self.part.measured(
                f"serve {shape_name} bfloat16: {count} requests, ours / transformers'",
                self._best[shape_name] / found["tokens_per_s"],
                "times",
                at_least=PEER_TARGET,
            )

    def _transformers(self, shape_name, count):
        from serve_transformers import Continuous
        from transformers import LlamaConfig as TheirConfig
        from transformers import LlamaForCausalLM

        shape = shape_of(shape_name, is_tiny=self.is_tiny)
        theirs = TheirConfig(**{**config_json(shape), "bos_token_id": None, "eos_token_id": None})
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with self.device:
                model = LlamaForCausalLM(theirs).eval()
        finally:
            torch.set_default_dtype(before)
        pages = {"max_memory_percent": 0.4}
        if self.is_tiny:
            pages = {"page_size": 32, "num_blocks": 256, "max_batch_tokens": 128}
        engine = Continuous.of(model, allow_block_sharing=False, **pages)
        try:
            requests = self._requests(shape_name, count)
            self._round(engine, requests)
            return figures("at once", requests, self._round(engine, requests))
        finally:
            engine.close()
            torch.set_grad_enabled(True)
            del engine, model
            gc.collect()

    def vllm(self, shape_name):
        """VLLM with random weights of its own, where it is installed."""
        count = self.at_once[0]
        name = f"serve {shape_name} bfloat16, vLLM, {count} requests: tokens/s"
        if importlib.util.find_spec("vllm") is None:
            self.part.skipped(name, "vLLM is not installed")
            return
        found = attempt(self.part, name, partial(self._vllm, shape_name, count), needs_s=60.0)
        free(self.device)
        if found is not None:
            self.part.measured(name, found["tokens_per_s"], "tokens/s", **found)

    def _vllm(self, shape_name, count):
        from serve_vllm import Vllm

        shape = shape_of(shape_name, is_tiny=self.is_tiny)
        folder = self.folder / f"vllm-{shape_name}"
        folder.mkdir()
        said = {**config_json(shape), "dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None}
        (folder / "config.json").write_text(json.dumps(said))
        engine = Vllm(folder, "bfloat16", load_format="dummy", gpu_memory_utilization=0.4)
        requests = self._requests(shape_name, count)
        self._round(engine, requests)
        return figures("at once", requests, self._round(engine, requests))


def main():
    part = open_part("serving", __doc__.partition("\n")[0])
    set_up(part.device)
    with tempfile.TemporaryDirectory() as folder:
        rows = Serving(part, Path(folder))
        serve = rows.serve
        run_cases(
            part,
            {
                "serving-canary": lambda: canary(
                    part, lambda tried: Serving(tried, Path(folder)).serve("8b", "bfloat16", (GRAPHS,))
                ),
                "serve-8b": partial(serve, "8b", "bfloat16", (COMPILED,)),
                "serve-8b-transformers": partial(rows.transformers, "8b"),
                "serve-8b-eager": partial(serve, "8b", "bfloat16", (EAGER,)),
                "serve-8b-graphs": partial(serve, "8b", "bfloat16", (GRAPHS,)),
                "serve-8b-int8": partial(serve, "8b", "int8", (COMPILED,)),
                "serve-8b-int4": partial(serve, "8b", "int4", (COMPILED,)),
                "serve-8b-float8": partial(serve, "8b", "float8", (COMPILED,)),
                "serve-1b": partial(serve, "1b", "bfloat16", (COMPILED,)),
                "serve-8b-vllm": partial(rows.vllm, "8b"),
            },
        )


if __name__ == "__main__":
    main()
