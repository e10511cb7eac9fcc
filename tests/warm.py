"""Commands of Penstock as processes that begin with everything imported: each is forked from a warm parent.

A module that runs as a process, such as that of chat templates, is forked likewise (`Process`).

    tests (one process)        a `Command` is a `subprocess.Popen` here: wait, kill, pipes, timeouts
      warm parent              has imported torch and the verbs; runs nothing, so that it may fork
      command, command ...     a child of the tests, too: see below

What a user types starts an interpreter, which imports for seconds. A command that is forked has its own
streams, folder, environment, process group, signals and exit code, and runs `penstock.__main__` to the
interpreter's own end. It does not show how the interpreter starts and how it takes its modules apart: a test
of that names the reason why it starts an interpreter.

A process can wait for its own children only. The warm parent therefore forks a process between, which forks
the command and ends; the kernel gives the orphan to the nearest ancestor that asked for orphans, which the
tests do for that moment (`prctl(2)`, PR_SET_CHILD_SUBREAPER). Others that are orphaned in that moment, such
as the daemons of a Slurm, come to the tests as well: `children` leaves them out.
"""

import atexit
import ctypes
import gc
import inspect
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from typing import Any, NoReturn

_IMPORTED = (
    "train.run",
    "train.planning.auto",
    "train.inspect.offline_eval",
    "train.speculator.run",
    "train.emulated",
    "engine.llm",
    "engine.assemble",
    "serve.app",
    "serve.server",
    "console.app",
    "doctor.run_checks",
    "evaluation.evaluate",
    "checkpoint.hf",
    "checkpoint.peft",
    "checkpoint.local_storage",
    "data.torch_dataset",
    "parallel.ethernet.compressed_all_reduce",
    "parallel.ethernet.quantized_gather",
    "parallel.ethernet.scheduler",
    "parallel.sharding.fsdp_waits",
    "parallel.tensor",
    "parallel.vocab_parallel",
    "train.inspect.audit",
    "train.islands.checkpoint",
    "train.islands.outer_optimizer",
    "train.live_engine",
    "train.samples",
)
_LIBRARIES = (
    "numpy.ma",
    "rich._emoji_codes",
    "safetensors",
    "tokenizers",
    "torch._dynamo",
    "torch.utils._device",
)
"""What commands import late: a command of several ranks would take 1 CPU-second for torch's dynamo."""
_IMPORTED_BY = {"penstock.text.template_process": ("penstock.text.learned_tokens", "resource")}
"""What the processes of another module import; it is small, as theirs has a limit on its memory."""
_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_")
"""How the names of variables begin that an interpreter reads as it starts."""

# No test cuts the power, so no claim of the tests, their ranks and their commands depends on fsync(2). They
# call it tens of thousands of times, and each call waits 4 ms or more for the disk.
os.fsync = lambda _: None

_CLAIM_ORPHANS = 36
_MOST_BYTES = 1 << 17


class Process(subprocess.Popen[Any]):
    """`subprocess.Popen` of `python -m MODULE WORD...`, forked from the warm parent of that module."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        assert given["preexec_fn"] is None, "runs in no forked command"
        assert not given["pass_fds"], "reach no forked command"
        _, option, module, *words = given["args"]
        assert option == "-m", given["args"]
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        environment = os.environ if given["env"] is None else given["env"]
        request = {
            "words": [os.fsdecode(word) for word in words],
            "folder": os.path.abspath(given["cwd"] or "."),  # noqa: PTH100 - may be text
            "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()},
            "session": given["start_new_session"],
        }
        with _lock:
            self.pid = _parent(module).fork(request, [n if fd == -1 else fd for n, fd in enumerate(streams)])
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in _PIPES))  # type: ignore[attr-defined]


class Command(Process):
    """`subprocess.Popen` of `penstock` with these words.

    Args:
        interpreter: why the command starts an interpreter; empty: it is forked from the warm parent.
        options: of `subprocess.Popen`.
    """

    def __init__(self, *words: object, interpreter: str = "", **options: Any):
        self._is_forked = not interpreter
        as_given = [word if isinstance(word, bytes) else str(word) for word in words]
        super().__init__([sys.executable, "-m", "penstock", *as_given], **options)

    def _execute_child(self, *arguments: Any) -> None:
        (super() if self._is_forked else super(Process, self))._execute_child(*arguments)  # type: ignore[misc]


def penstock(
    *words: object, stdin: Any = None, timeout: float = 240, text: bool = True, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, as `subprocess.run` does.

    Args:
        stdin: what the command reads.
        timeout: seconds after which it is killed.
        text: its streams are text, not bytes.
        options: of `Command`.
    """
    if stdin is not None:
        options["stdin"] = subprocess.PIPE
    with Command(*words, text=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            out, errors = process.communicate(stdin, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


class _Parent:
    """The warm parent of a module's processes, as the tests talk to it."""

    def __init__(self, module: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(os.environ)
        with theirs:
            words = [sys.executable, __file__, str(theirs.fileno()), module]
            self.process = subprocess.Popen(words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], streams: list[int]) -> int:
        """Return the process of a command, by now a child of this one."""
        both = {*request["environment"].items()} ^ {*self._environment.items()}
        early = sorted({name for name, _ in both if name.startswith(_READ_AT_START)})
        assert not early, f"{', '.join(early)}: read as an interpreter starts, so name a reason for one"
        socket.send_fds(self._socket, [json.dumps(request).encode()], streams)
        pid = int(self._socket.recv(_MOST_BYTES))
        libc, before = ctypes.CDLL(None), _all_children()
        libc.prctl(_CLAIM_ORPHANS, 1, 0, 0, 0)
        self._socket.send(b"end")
        self._socket.recv(_MOST_BYTES)
        libc.prctl(_CLAIM_ORPHANS, 0, 0, 0, 0)
        _strangers.update(_all_children() - before - {pid})
        return pid

    def close(self) -> None:
        self._socket.close()
        self.process.wait()


_lock = threading.Lock()
_parents: dict[str, _Parent] = {}


def _parent(module: str = "penstock") -> _Parent:
    if module not in _parents or _parents[module].process.poll() is not None:  # a test may have killed it
        _parents[module] = _Parent(module)
    return _parents[module]


_strangers: set[int] = set()


def children() -> set[int]:
    """Return the direct children of this process, but the warm parent and strangers; none without /proc."""
    return _all_children() - _strangers - {parent.process.pid for parent in _parents.values()}


def _all_children() -> set[int]:
    found: set[int] = set()
    tasks = "/proc/self/task"  # a text: a Path takes as long as its file
    for thread in os.listdir(tasks) if os.path.isdir(tasks) else []:  # noqa: PTH112, PTH208
        try:
            with open(f"{tasks}/{thread}/children") as file:  # noqa: PTH123
                found.update(map(int, file.read().split()))
        except OSError:  # the thread has just ended
            continue
    return found


def _import_all() -> None:
    from penstock.cli.main import VERBS, _module_of
    from penstock.core.env import silence_torch, sleep_at_barriers
    from penstock.core.garbage import tune_gc

    tune_gc()
    sleep_at_barriers()
    silence_torch()
    for verb in VERBS:
        import_module(_module_of(verb))
    for name in _IMPORTED:
        import_module(f"penstock.{name}")
    for name in _LIBRARIES:
        import_module(name)
    # Only MFU depends on the measured peak of a CPU, and each rank of each run measures it: 0.1 to 0.3 s.
    peak = import_module("penstock.obs.peak")
    peak._LONG_ENOUGH_S, peak._MAX_S = 0.0005, 0.03
    gc.collect()
    gc.freeze()  # else a collection in a child would copy the parent's memory


def _serve(channel: socket.socket) -> list[str]:
    """Fork commands until the tests end; return, in each command, its words."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        text, streams, _, _ = socket.recv_fds(channel, _MOST_BYTES, 3)
        if not text:
            os._exit(0)
        if os.fork() == 0:
            if command := os.fork():
                channel.send(str(command).encode())
                channel.recv(_MOST_BYTES)
                os._exit(0)
            channel.close()
            return _begin(json.loads(text), streams)
        for stream in streams:
            os.close(stream)
        os.wait()
        channel.send(b"ended")


def _begin(request: dict[str, Any], streams: list[int]) -> list[str]:
    """Be the process that the request describes; return its words."""
    if request["session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writing(1, sys.stdout.errors)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _writing(2, "backslashreplace")  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words: list[str] = request["words"]
    return words


def _writing(number: int, errors: str | None) -> io.TextIOWrapper:
    by_line = number == 2 or os.isatty(number)
    raw = open(number, "wb", closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(raw, errors=errors, line_buffering=by_line)


def _leave(code: int) -> NoReturn:
    """End as the interpreter does, but leave the modules to the system: taking them apart takes 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError:
        code = code or 120  # as the interpreter says it
    os._exit(code)


if __name__ == "__main__":
    name = sys.argv[2]
    for each in _IMPORTED_BY.get(name, ()):
        import_module(each)
    if name == "penstock":
        _import_all()
    sys.argv[1:] = _serve(socket.socket(fileno=int(sys.argv[1])))
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int):
            _leave(end.code)
        raise
    _leave(0)
