"""Compiled programs are found again by another process, in the folder the recipe names."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, os, sys
from types import SimpleNamespace
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import compile_fx
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig

def compile_two():
    model = SimpleNamespace(layers=nn.ModuleList(nn.GELU() for _ in range(2)))
    compile_blocks(model, CompileConfig(enabled=True, cache=sys.argv[1]))
    with torch.no_grad():
        for block in model.layers:
            torch.testing.assert_close(block(torch.ones(8)), nn.functional.gelu(torch.ones(8)))
    found = counters["inductor"]
    print(json.dumps([found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]), flush=True)

torch.set_num_threads(1)
for _ in range(2):
    if not (child := os.fork()):
        compile_two()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("a process failed")
"""
"""Two processes, forked one after the other from one that has imported the compiler but compiled nothing."""


def test_a_second_process_compiles_nothing_anew(tmp_path):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # for one program they cost more than they save
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # builds no library to see what instructions the CPU has
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path / "programs"],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [[0, 1], [1, 0]], "two blocks are one program, which the second process reads"
    assert (tmp_path / "programs").is_dir()
