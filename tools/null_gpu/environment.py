"""The environment of the null GPU: Python 3.12 with the CUDA build of torch, and the preloaded library.

Both lie in the user's cache, because they take 4.9 GB; `PENSTOCK_NULL_GPU` names another folder. gcc makes
the library from `device/*.c` and a function that does nothing for each other name of CUDA that torch wants.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEVICE = Path(__file__).parent / "device"
TORCH = "2.11.0"
PACKAGES = (
    f"torch=={TORCH}", "numpy", "safetensors", "jaxtyping", "transformers", "tokenizers", "pyarrow", "fsspec",
    "peft", "pytest", "hypothesis", "psutil",
)  # fmt: skip
_PYTHON = "3.12"
_STUBBED = re.compile(r"(__cuda|cuda|cu[A-Z]|cublas|cudnn|nccl)\w+")
_CALLED = re.compile(r"\b(cu[A-Z]\w+)\(")
_LIBRARIES = ("libtorch_cuda.so", "libtorch_cuda_linalg.so", "libc10_cuda.so", "libtorch_python.so")


class MissingError(Exception):
    """What the null GPU needs is not on this machine: what, and what to do."""


def folder() -> Path:
    """Return the folder of the environment."""
    named = os.environ.get("PENSTOCK_NULL_GPU")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(named) if named else cache / "penstock-null-gpu"


def python() -> Path:
    """Return the environment's Python; install it first where it is missing, which downloads 4.9 GB.

    Raises:
        MissingError: there is no Python 3.12, or pip failed.
    """
    made = folder() / "venv" / "bin" / "python"
    marker = folder() / f"torch-{TORCH}"
    if made.exists() and (marker.exists() or _has_torch(made)):
        return made
    found = _found_python()
    if found is None:
        raise MissingError(
            f"The null GPU needs Python {_PYTHON}, and no python{_PYTHON} on the path runs. Install it "
            f"(uv python install {_PYTHON}, or the system's packages), or set PENSTOCK_NULL_GPU to a folder "
            "whose venv has it."
        )
    print(f"installing torch {TORCH} for CUDA into {folder()} (4.9 GB)", flush=True)
    folder().mkdir(parents=True, exist_ok=True)
    for command in (
        [found, "-m", "venv", str(made.parents[1])],
        [str(made), "-m", "pip", "install", "--quiet", *PACKAGES],
    ):
        if subprocess.run(command, check=False).returncode:
            raise MissingError(
                f"{' '.join(command)} failed (above). Free 6 GB, or check the network, and try again."
            )
    marker.touch()
    return made


def _found_python() -> str | None:
    """Return the first on the path that runs: pyenv has a stub of each version, which may refuse."""
    folders = os.get_exec_path()
    found = filter(None, (shutil.which(f"python{_PYTHON}", path=folder) for folder in folders))
    return next((path for path in found if not _refuses(path)), None)


def _refuses(python: str) -> bool:
    return subprocess.run([python, "--version"], capture_output=True, check=False).returncode != 0


def _has_torch(made: Path) -> bool:
    return any((made.parents[1] / "lib").glob(f"python{_PYTHON}/site-packages/torch-{TORCH}*.dist-info"))


def library() -> Path:
    """Return the folder of the library, `libnull.so` and `libcuda.so.1`; compile it where a source changed.

    Raises:
        MissingError: there is no gcc or nm, or the sources do not compile.
    """
    sources = sorted(DEVICE.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + TORCH.encode())
    made = folder() / f"device-{digest.hexdigest()[:16]}"
    if (made / "libcuda.so.1").exists():
        return made
    for program in ("gcc", "nm"):
        if shutil.which(program) is None:
            raise MissingError(f"The null GPU is compiled by gcc, and {program} is missing. Install gcc.")
    site = python().parents[1] / "lib" / f"python{_PYTHON}" / "site-packages"
    made.mkdir(parents=True, exist_ok=True)
    include = made / "include"  # the headers of torch's CUDA lack crt/, which Triton's wheel has
    include.mkdir(exist_ok=True)
    (include / "crt").unlink(missing_ok=True)
    (include / "crt").symlink_to(site / "triton" / "backends" / "nvidia" / "include" / "crt")
    own = [source for source in sources if source.suffix == ".c"]
    _compile([*map(str, own)], made / "own.so", site, include)
    triton = site / "triton" / "backends" / "nvidia" / "driver.c"  # compiled when a kernel is first launched
    names = _undefined([site / "torch" / "lib" / name for name in _LIBRARIES])
    names = (names | set(_CALLED.findall(triton.read_text()))) - set(
        _names(made / "own.so", "--defined-only")
    )
    rest = made / "rest.c"
    rest.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(names)))
    _compile([*map(str, own), str(rest)], made / "libnull.so", site, include)
    (made / "libcuda.so.1").symlink_to("libnull.so")  # a link: two copies would be two sets of counters
    return made


def variables() -> dict[str, str]:
    """Return the environment of a process under the null GPU."""
    device = library()
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
    return {
        **os.environ,
        "LD_PRELOAD": str(device / "libnull.so"),
        "LD_LIBRARY_PATH": str(device),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",  # the null cuDNN is older than any
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool of processes, each with the library, does not end
        "TORCHINDUCTOR_CACHE_DIR": str(folder() / "inductor"),
        "TRITON_CACHE_DIR": str(folder() / "triton"),
    }


def _compile(sources: list[str], made: Path, site: Path, include: Path) -> None:
    headers = [f"-I{site / 'nvidia' / 'cu13' / 'include'}", f"-I{include}"]
    options = ["-O1", "-fPIC", "-shared", "-w", "-std=gnu11"]
    done = subprocess.run(
        ["gcc", *options, *headers, *sources, "-o", str(made), "-ldl", "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise MissingError(f"gcc could not compile the null GPU:\n{done.stderr}")


def _undefined(libraries: list[Path]) -> set[str]:
    """Return the names of CUDA that some libraries ask for."""
    return {name for path in libraries if path.exists() for name in _names(path, "--undefined-only")}


def _names(library: Path, which: str) -> list[str]:
    said = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True)
    names = (line.split()[-1].partition("@")[0] for line in said.stdout.splitlines())
    return [name for name in names if _STUBBED.fullmatch(name)]
