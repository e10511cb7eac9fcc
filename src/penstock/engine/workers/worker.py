"""Worker process of an engine: `python -m penstock.engine.workers.worker PIPE`.

It loads its shard of the model, allocates a KV cache for its heads, then computes every step that the first
rank sends. It does not sample and knows no requests. It exits when the pipe closes.
"""

import json
import logging
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.errors import PenstockError
from penstock.core.garbage import tune_gc
from penstock.core.log import EventLog
from penstock.engine.config import EngineConfig
from penstock.engine.model_runner.batch import decode
from penstock.engine.workers.processes import COMMAND, STEP
from penstock.models.decoder.tensor_slices import TensorParallelRank

if TYPE_CHECKING:
    from penstock.engine.model_runner.runner import Runner
    from penstock.engine.workers.model_shard import ModelShard


_DONE = b"{}"

log = EventLog(__name__)


def main() -> int:
    """Run the worker described by the pipe's first message; return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank decides when to exit
        signal.signal(number, signal.SIG_IGN)
    with Connection(int(sys.argv[1])) as pipe:
        try:
            _serve(pipe, json.loads(pipe.recv_bytes()))
        except EOFError:  # the first rank ended
            return 0
        except PenstockError as error:
            return _fail(pipe, str(error))
        except Exception as error:  # whatever it is, the first rank must be told
            return _fail(pipe, "" if _is_of_lost_peer(error) else f"{type(error).__name__}: {error}")
    return 0


def _serve(pipe: Connection, job: dict[str, Any]) -> None:  # Any: JSON
    from penstock.engine.workers.model_shard import (
        open_part,  # loads torch for seconds, and Ctrl-C must be ignored by then
    )

    config = _config(job["config"])
    part, _ = open_part(
        Path(job["path"]), config, place=TensorParallelRank(job["rank"], config.tensor_parallel)
    )
    pipe.send_bytes(_DONE)
    try:
        _compute(pipe, part, Path(job["meeting"]))
    finally:
        part.close()


def _compute(pipe: Connection, part: "ModelShard", meeting: Path) -> None:
    """Execute the first rank's messages until it closes the pipe."""
    assert part.group is not None
    join = json.loads(pipe.recv_bytes()[len(COMMAND) :])
    part.group.join(meeting)
    part = part.with_kernels(join["kernels"])
    runner = part.runner(num_blocks=join["num_blocks"], block_size=join["block_size"])
    pipe.send_bytes(_DONE)
    while True:
        message = memoryview(bytearray(pipe.recv_bytes()))
        content = message[len(STEP) :]
        if bytes(message[: len(STEP)]) == STEP:
            runner.run(decode(content))
        else:
            _change_adapters(runner, **json.loads(bytes(content)))
            pipe.send_bytes(_DONE)


def _change_adapters(runner: "Runner", *, name: str, folder: str | None) -> None:
    if folder is None:
        runner.remove_adapter(name)
    else:
        runner.add_adapter(name, Path(folder))


def _config(raw: dict[str, Any]) -> EngineConfig:  # Any: JSON
    adapters = {name: Path(folder) for name, folder in raw["adapters"].items()}
    return EngineConfig(**{**raw, "adapters": adapters, "ignored_keys": tuple(raw["ignored_keys"])})


def _fail(pipe: Connection, why: str) -> int:
    try:
        pipe.send_bytes(json.dumps({"error": why}).encode())
    except OSError:  # the first rank ended too
        log.debug("first_rank_left", "The first rank has exited", exc_info=True)
    return 1


def _is_of_lost_peer(error: Exception) -> bool:
    from penstock.parallel.mesh import is_of_lost_peer  # imports torch, loaded if there was a peer

    return is_of_lost_peer(error) or "imed out" in str(error) or "timeout" in str(error)


if __name__ == "__main__":
    tune_gc()
    code = main()
    logging.shutdown()
    os._exit(code)  # skip interpreter shutdown: unloading torch takes a second
