"""llama.cpp through the C API of llama-cpp-python, with many sequences in one batch as its server does."""

import os
import subprocess
import sys
from pathlib import Path

import llama_cpp as api
import numpy as np

_SEATS, _BATCH, _CONTEXT = 64, 512, 1024
_THREADS = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count()))
_SILENT = api.llama_log_callback(lambda *_: None)


class LlamaCpp:
    """Every running sequence gets its next token in a step, prompts the rest of 512."""

    kind = None

    def __init__(self, folder, dtype):
        kind = self.kind or {"bfloat16": "bf16", "float32": "f32"}[dtype]
        path = folder / f"{kind}.gguf"
        if not path.exists():
            script = Path(__file__).with_name("serve_models.py")
            subprocess.run([sys.executable, script, folder, path, kind], check=True)
        api.llama_log_set(_SILENT, None)
        api.llama_backend_init()
        model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = _SEATS * _CONTEXT, _SEATS
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = _THREADS
        if hasattr(params, "kv_unified"):
            params.kv_unified = False
        self._context = api.llama_init_from_model(model, params)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._batch = api.llama_batch_init(_BATCH, 0, 1)
        self._waiting, self._running = (
            [],
            {},
        )  # running: seat -> [index, tokens not yet computed, position, left]

    @property
    def has_work(self):
        """Whether any request has not ended."""
        return bool(self._waiting or self._running)

    def add(self, index, prompt, max_tokens):
        """Queue a request."""
        self._waiting.append([index, prompt, 0, max_tokens])

    def step(self):
        """Return the indices that got a token."""
        while self._waiting and len(self._running) < _SEATS:
            seat = min(set(range(_SEATS)) - set(self._running))
            self._running[seat] = self._waiting.pop(0)
        self._batch.n_tokens = 0
        drawn = {}
        for seat, state in sorted(self._running.items(), key=lambda item: len(item[1][1])):
            self._put(seat, state, drawn)
        if api.llama_decode(self._context, self._batch):
            raise RuntimeError("llama_decode failed")
        return [self._take(seat, row) for seat, row in drawn.items()]

    def _put(self, seat, state, drawn):
        _, tokens, position, _ = state
        batch = self._batch
        for token in tokens[: _BATCH - batch.n_tokens]:
            row = batch.n_tokens
            batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
            batch.seq_id[row][0], batch.logits[row] = seat, 0
            batch.n_tokens, position = row + 1, position + 1
        state[1], state[2] = tokens[position - state[2] :], position
        if not state[1]:
            batch.logits[batch.n_tokens - 1] = 1
            drawn[seat] = batch.n_tokens - 1

    def _take(self, seat, row):
        state = self._running[seat]
        logits = np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, row), (self._vocabulary,))
        state[1], state[3] = [int(logits.argmax())], state[3] - 1
        if not state[3]:
            del self._running[seat]
            api.llama_memory_seq_rm(api.llama_get_memory(self._context), seat, -1, -1)
        return state[0]


class Q8(LlamaCpp):
    """With 8-bit weights."""

    kind = "q8_0"
