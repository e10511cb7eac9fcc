"""Compiled programs are found again by another process, in the folder the recipe names."""

import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
from types import SimpleNamespace
import torch
from torch import nn
from torch._dynamo.utils import counters
from penstock.parallel.apply import compile_blocks
from penstock.parallel.config import CompileConfig

torch.set_num_threads(1)
model = SimpleNamespace(layers=nn.ModuleList(nn.GELU() for _ in range(2)))
compile_blocks(model, CompileConfig(enabled=True, cache=sys.argv[1]))
with torch.no_grad():
    for block in model.layers:
        torch.testing.assert_close(block(torch.ones(8)), nn.functional.gelu(torch.ones(8)))
found = counters["inductor"]
print(json.dumps([found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]]))
"""


def test_a_second_process_compiles_nothing_anew(tmp_path):
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, tmp_path / "programs"],
            capture_output=True,
            text=True,
            timeout=240,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(json.loads(done.stdout.splitlines()[-1]))
    assert found == [[0, 1], [1, 0]], "two blocks are one program, which the second process reads"
    assert (tmp_path / "programs").is_dir()
